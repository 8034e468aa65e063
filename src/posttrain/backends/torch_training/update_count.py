"""Counters of the updates made, and the position in the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.backends.torch_training.rates import Rates


@dataclass(slots=True)
class UpdateCount:
    """Counters stored in checkpoints, with the schedule that they are positions in.

    The position in the schedule is the number of updates made; or, where it moves once per step, the updates planned for the
    steps before this one: a skipped update, or a step with fewer updates than planned, does not shift it.
    """

    # Planned, of a schedule that moves once per step; None: it moves with every update.
    updates_per_step: int | None = None
    rates: Rates | None = None  # None: the checkpoint holds no schedule
    made: int = 0
    steps: int = 0  # begun

    @property
    def place(self) -> int:
        """Position in the schedule: the number of the update, from 0."""
        return self.made if self.updates_per_step is None else max(self.steps - 1, 0) * self.updates_per_step

    def saved(self) -> dict[str, Any]:
        """Return plain values for ``restore``."""
        steps = {} if self.updates_per_step is None else {"steps": self.steps}
        return {"updates": self.made} | steps | ({"rates": self.rates.saved()} if self.rates else {})

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the counters of a checkpoint, or start from zero without them. A checkpoint of an earlier version has no steps:
        they follow from its updates."""
        self.made = int(saved["updates"]) if saved else 0
        if self.rates and saved:
            self.rates.restore(saved.get("rates"))
            self.updates_per_step = self.rates.updates_per_move
        steps = self.made // (self.updates_per_step or 1)
        self.steps = int(saved.get("steps", steps)) if saved else 0
