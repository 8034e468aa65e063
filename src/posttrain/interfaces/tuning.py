"""Interface of a tuning method to the loop: one update on the rows of a step, and a look at held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.records.statistics import UpdateStats
from posttrain.records.texts import Text

Row = TypeVar("Row", contravariant=True)


class Task(Protocol[Row]):
    """A kind of row, and how it is learned."""

    def step(self, rows: Sequence[Row], clock: PhaseClock) -> UpdateStats:
        """Make one update on the rows, in the phase ``update``. Returns: metrics by name."""
        ...

    def validate(self, rows: Sequence[Row], clock: PhaseClock) -> dict[str, float]:
        """Measure held-out rows, in the phase ``validation_loss``, with names that begin with validation/."""
        ...

    def texts(self, rows: Sequence[Row]) -> list[Text]:
        """Return the texts that an update on the rows reads."""
        ...
