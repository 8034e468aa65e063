"""Prompts, step by step, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from posttrain.records.prompts import Prompt


class PromptLoader(Protocol):
    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epochs(self) -> float:
        """Passes over the data that have been drawn so far."""
        ...

    def next(self) -> list[Prompt]:
        """The prompts of the next step; a new epoch begins by itself."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Plain values from which ``restore`` goes on exactly here."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
