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

    @property
    def stopping(self) -> bool:
        """Return True once a stop was requested, also where the step can no longer be left."""
        ...

    def in_lane(self, lane: str) -> PhaseClock:
        """The same clock for another thread, whose phases may overlap with those of this one. Its ``phase`` and ``advance`` raise
        as soon as a stop was requested: its work is for a later step."""
        ...

    def advance(self, units: int) -> None:
        """Report units of work that are done (tokens of a rollout, sequences of an update). May raise, as ``phase``."""
        ...
