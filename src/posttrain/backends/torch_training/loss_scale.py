"""The factor of the loss in float16, whose smallest gradients would otherwise be 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 1.0
UPDATES = 1000  # without an overflow, before the factor is doubled


@dataclass(slots=True)
class LossScale:
    """A power of two, so that scaling rounds nothing: halved after a gradient that is not finite, whose update is skipped, and
    doubled after 1000 updates without one. Source: arXiv:1710.03740, section 3.2.1; numbers as in DeepSpeed."""

    value: float = FIRST
    good: int = 0  # updates since it changed

    def after(self, *, finite: bool) -> None:
        """Adapt to the outcome of an update."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(SMALLEST, self.value / 2)
        elif self.good == UPDATES:
            self.value, self.good = min(LARGEST, self.value * 2), 0

    def saved(self) -> dict[str, float]:
        """Return plain values for ``restore``."""
        return {"value": self.value, "good": self.good}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with the factor of a checkpoint; without one, from the first."""
        self.value = float(saved["value"]) if saved else FIRST
        self.good = int(saved["good"]) if saved else 0
