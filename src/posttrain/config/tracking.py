"""Where metrics and samples go."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section


class TrackingConfig(Section):
    trackers: list[str] = ["console"]
    """Besides metrics.jsonl, which is always written: console."""
    project: str = "posttrain"
    """Project under which trackers file the run."""
    samples_every_steps: int | None = Field(default=1, ge=1)
    """Write samples/step_N.jsonl every so many steps; null never."""
