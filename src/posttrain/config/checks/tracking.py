"""Settings of the trackers that no chosen tracker reads."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.tracking import SERVICES, TrackingConfig
from posttrain.errors import Problem

READERS = {
    "offline": ("wandb", "swanlab"),
    "proxy": ("wandb",),
    "validation_samples": SERVICES,
    "dialect_names": SERVICES,
}


def tracking_problems(tracking: TrackingConfig) -> Iterator[Problem]:
    """Report invalid settings."""
    if "jsonl" in tracking.trackers:
        what = "metrics.jsonl is written in any case, and jsonl is no tracker besides"
        yield Problem(what, fix="leave it out", field="tracking.trackers")


def tracking_warnings(tracking: TrackingConfig) -> Iterator[str]:
    """Report settings that have no effect, in sentences."""
    default = TrackingConfig()
    for name, readers in READERS.items():
        if getattr(tracking, name) != getattr(default, name) and not set(readers) & set(tracking.trackers):
            yield f"tracking.{name} has no effect: tracking.trackers has none of {', '.join(readers)}"
