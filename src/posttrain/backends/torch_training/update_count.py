"""The updates that an engine has made, and the place of its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class UpdateCount:
    """Counters that checkpoints hold.

    The schedule stands at the number of updates made; or, where it moves once per step, at the updates planned for the steps
    before this one: an update that was skipped, or a step with fewer updates than planned, does not shift it.
    """

    updates_per_step: int | None = (
        None  # planned, of a schedule that moves once per step; None: it moves with every update
    )
    made: int = 0
    steps: int = 0  # begun

    @property
    def place(self) -> int:
        """The number of the update, from 0, that the schedule is asked about."""
        return self.made if self.updates_per_step is None else max(self.steps - 1, 0) * self.updates_per_step

    def saved(self) -> dict[str, int]:
        """Plain values for ``restore``."""
        return {"updates": self.made} | ({} if self.updates_per_step is None else {"steps": self.steps})

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Take the counters of a checkpoint, or begin anew without them. One by an earlier version has no steps: they are those
        of its updates."""
        self.made = int(saved["updates"]) if saved else 0
        steps = self.made // (self.updates_per_step or 1)
        self.steps = int(saved.get("steps", steps)) if saved else 0
