"""What is saved, when, and what stays."""

from __future__ import annotations

from typing import Literal

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
    keep_best: int | None = Field(default=None, ge=1)
    """Besides those, keep so many with the best values of best_metric; null keeps none for that."""
    best_metric: str | None = None
    """Name of a metric in metrics.jsonl, such as reward/mean or validation/TASK/accuracy; needed by keep_best."""
    best_mode: Literal["max", "min"] = "max"
    """Whether high or low values of best_metric are good."""
    keep_every: int | None = Field(default=None, ge=1)
    """Besides those, keep the checkpoints of steps that this divides; null keeps none for that."""
