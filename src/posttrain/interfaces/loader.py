"""Interface of the data loader: the items of each step, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import ScoredGroup

T = TypeVar("T")


class Position(Protocol):
    """State that a resumed run restores."""

    def state(self) -> Mapping[str, Any]:
        """Return plain values from which ``restore`` resumes at this exact position."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class StepLoader(Position, Protocol[T]):
    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epochs(self) -> float:
        """Return the number of passes over the data so far, a fraction."""
        ...

    def next(self) -> list[T]:
        """Return the items of the next step; a new epoch begins automatically."""
        ...


class PromptLoader(StepLoader[Prompt], Protocol):
    def next(self, domains: Collection[str] | None = None) -> list[Prompt]:
        """Return the prompts of the next step, or those of some of its domains. Args: domains, their names; None: all."""
        ...

    def learned(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Show a curriculum the scored groups of a step, after its update; a no-op for every other order. Returns: metrics."""
