"""Prompts in a seeded order, step by step, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.errors import ConfigError, Problem
from posttrain.records.prompts import Prompt


class ShuffledLoader:
    """A PromptLoader over a list of prompts.

    Each epoch has an order of its own, a permutation drawn from (seed, epoch) alone, so a position is two numbers. The
    prompts that do not fill the last batch of an epoch are left out of that epoch.

    Args: ``shuffle`` False keeps the order of the list in every epoch.
    Raises: ConfigError when there are fewer prompts than a step needs.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, *, seed: int, shuffle: bool):
        if len(prompts) < prompts_per_step:
            raise ConfigError(
                Problem(
                    f"a step needs {prompts_per_step} prompts and the dataset has {len(prompts)}",
                    fix=f"set data.prompts_per_step to at most {len(prompts)}, or add prompts",
                    field="data.prompts_per_step",
                )
            )
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._step = 0  # of this epoch
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._prompts) // self._prompts_per_step

    @property
    def epochs(self) -> float:
        """Passes over the data that have been drawn so far; an epoch's left-out prompts count as drawn."""
        return (self._epoch * self.steps_per_epoch + self._step) / self.steps_per_epoch

    def next(self) -> list[Prompt]:
        """The prompts of the next step; a new epoch begins by itself."""
        if self._step == self.steps_per_epoch:
            self._epoch += 1
            self._step = 0
            self._order = self._order_of(self._epoch)
        start = self._step * self._prompts_per_step
        self._step += 1
        return [self._prompts[index] for index in self._order[start : start + self._prompts_per_step]]

    def state(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean the same prompts."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken.

        Raises: ConfigError, with everything that differs, when it was taken from another order of prompts.
        """
        problems = [
            Problem(
                f"the saved position is of {name} = {state.get(name)}, and this run has {value}",
                fix=f"set {field}={_written(state.get(name))}, or start a new run"
                if field
                else "use the files and data.max_prompts the run began with",
                field=field or "data.train_files",
            )
            for (name, value), field in zip(self._identity().items(), _FIELDS, strict=True)
            if state.get(name) != value
        ]
        if problems:
            raise ConfigError(problems)
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "prompts": len(self._prompts),
            "prompts_per_step": self._prompts_per_step,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order_of(self, epoch: int) -> list[int]:
        """Indices of all prompts in the order of this epoch."""
        if not self._shuffle:
            return list(range(len(self._prompts)))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return [int(index) for index in generator.permutation(len(self._prompts))]


# The config field behind each entry of ShuffledLoader._identity.
_FIELDS = ("", "data.prompts_per_step", "data.seed", "data.shuffle")


def _written(value: Any) -> str:
    """A value as an override writes it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
