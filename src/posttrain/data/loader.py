"""A seeded loader of prompts or texts, step by step, whose position can be saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from posttrain.errors import ConfigError, Problem
from posttrain.records.trajectories import ScoredGroup

T = TypeVar("T")


class ShuffledLoader(Generic[T]):
    """A StepLoader over a list of prompts (or other items).

    Each epoch has its own order, a permutation drawn from (seed, epoch) alone, so a position is two numbers. Items that do not
    fill the last batch of an epoch are left out of that epoch.

    Args: ``shuffle`` False keeps the order of the list in every epoch; ``kind`` names the items in messages and in the setting
        data.KIND_per_step, which is ``per_step``; where an item is several sequences (a pair is two), the setting is
        data.sequences_per_step and counts those.
    Raises: ConfigError when there are fewer items than a step needs.
    """

    def __init__(
        self, items: Sequence[T], per_step: int, *, seed: int, shuffle: bool, kind: str = "prompts", sequences: int = 0
    ):
        self._kind = kind
        self._unit = sequences or 1  # of the setting
        self._field = field = "data.sequences_per_step" if sequences else f"data.{kind}_per_step"
        if len(items) < per_step:
            raise ConfigError(
                Problem(
                    f"a step needs {per_step} {kind} and the dataset has {len(items)}",
                    fix=f"set {field} to at most {len(items) * self._unit}, or add {kind}",
                    field=field,
                )
            )
        self._items = items
        self._per_step = per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._step = 0  # within this epoch
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._items) // self._per_step

    @property
    def epochs(self) -> float:
        """Return the number of passes over the data, a fraction; left-out prompts of an epoch count as drawn."""
        return (self._epoch * self.steps_per_epoch + self._step) / self.steps_per_epoch

    def next(self, domains: Collection[str] | None = None) -> list[T]:
        """Return the items of the next step; a new epoch begins automatically. There are no domains to choose from."""
        if self._step == self.steps_per_epoch:
            self._epoch += 1
            self._step = 0
            self._order = self._order_of(self._epoch)
        start = self._step * self._per_step
        self._step += 1
        return [self._items[index] for index in self._order[start : start + self._per_step]]

    def learned(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """No-op: the order is fixed by the seed."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the position, with the settings that must be equal for it to mean the same items."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after ``state``.

        Raises: ConfigError, with all differences, when the state belongs to another order of items.
        """
        problems = [
            Problem(
                f"the saved position is of {name} = {state.get(name)}, and this run has {value}",
                fix=f"set {field}={self._written(field, state.get(name))}, or start a new run"
                if field
                else f"use the files and the limit of {self._kind} the run began with",
                field=field or "data.train_files",
            )
            for (name, value), field in zip(self._identity().items(), self._fields(), strict=True)
            if state.get(name) != value
        ]
        if problems:
            raise ConfigError(problems)
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._order = self._order_of(self._epoch)

    def _written(self, field: str, value: Any) -> str:
        """Format a saved value as in an override of its setting."""
        return _written(value * self._unit if field == self._field and isinstance(value, int) else value)

    def _identity(self) -> dict[str, Any]:
        return {
            self._kind: len(self._items),
            f"{self._kind}_per_step": self._per_step,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _fields(self) -> tuple[str, ...]:
        """Return the setting of each part of the identity; "": the files."""
        return ("", self._field, "data.seed", "data.shuffle")

    def _order_of(self, epoch: int) -> list[int]:
        """Return the indices of all items in the order of this epoch."""
        if not self._shuffle:
            return list(range(len(self._items)))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return [int(index) for index in generator.permutation(len(self._items))]


def _written(value: Any) -> str:
    """Format a value as in an override."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
