"""What a run learns from, step by step, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from posttrain.records.prompts import Prompt

T = TypeVar("T")


class Position(Protocol):
    """Something that a resumed run must go on from where it was."""

    def state(self) -> Mapping[str, Any]:
        """Plain values from which ``restore`` goes on exactly here."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class StepLoader(Position, Protocol[T]):
    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epochs(self) -> float:
        """Passes over the data that have been drawn so far."""
        ...

    def next(self) -> list[T]:
        """The items of the next step; a new epoch begins by itself."""
        ...


PromptLoader = StepLoader[Prompt]
