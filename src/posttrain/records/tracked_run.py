"""A run as the services see it that its metrics are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.tracking import TrackingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run's identity and settings, for a service that is opened."""

    folder: Path  # RUN_DIR
    run_id: str  # 32 hexadecimal digits; a resumed run keeps it
    name: str
    tracking: TrackingConfig
    config: Mapping[str, Any]  # all settings, as config.yaml has them
