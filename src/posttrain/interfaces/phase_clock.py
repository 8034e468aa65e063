"""The clock that a step is given: it times the phases of the step and shows their progress."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class PhaseClock(Protocol):
    """See run.clock.Clock."""

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Time everything inside; ``total`` is its amount of work, when known. May raise, to leave a step that has changed no
        weights yet."""
        ...

    def in_lane(self, lane: str) -> PhaseClock:
        """The same clock for another thread, whose phases may overlap with those of this one."""
        ...

    def advance(self, units: int) -> None:
        """Report units of work that are done (tokens of a rollout, sequences of an update). May raise, as ``phase``."""
        ...
