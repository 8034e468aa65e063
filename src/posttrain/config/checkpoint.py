"""What is saved, and when."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section


class CheckpointConfig(Section):
    folder: str | None = None
    """Folder of the checkpoints; null means checkpoints in the run folder."""
    every_steps: int | None = Field(default=None, ge=1)
    """Save after every so many steps; null means only at the end."""
    at_end: bool = True
    """Save after the last step."""
    keep_last: int | None = Field(default=None, ge=1)
    """Keep only the newest so many checkpoints; null keeps all."""
