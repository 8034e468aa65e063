"""A loader of steps that are made up of fixed numbers of prompts of several domains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.config.domains import DomainConfig
from posttrain.data.loader import ShuffledLoader
from posttrain.errors import ConfigError, Problem
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import ScoredGroup

T = TypeVar("T")


class DomainLoader:
    """A PromptLoader with a position in each domain's rows, so that small domains begin their next epoch earlier.

    The prompts of a step alternate, so that every stretch of it has each domain's share to within one. Rows of no domain are
    never drawn.

    Raises: ConfigError, with every domain that has fewer rows than its part of a step.
    """

    def __init__(self, prompts: Sequence[Prompt], domains: Mapping[str, DomainConfig], *, seed: int, shuffle: bool):
        self._parts: dict[str, ShuffledLoader[Prompt]] = {}
        problems = []
        for name, domain in domains.items():
            rows = [prompt for prompt in prompts if prompt.data_source in domain.sources]
            try:
                self._parts[name] = ShuffledLoader(rows, domain.prompts_per_step, seed=seed, shuffle=shuffle)
            except ConfigError as error:
                problems += [_of_domain(problem, name, domain) for problem in error.problems]
        if problems:
            raise ConfigError(problems)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps after which every row was drawn."""
        return max(part.steps_per_epoch for part in self._parts.values())

    @property
    def epochs(self) -> float:
        """Return the passes over the rows of the domain that has begun most of them."""
        return max(part.epochs for part in self._parts.values())

    def next(self, domains: Collection[str] | None = None) -> list[Prompt]:
        """Return the prompts of the next step. Args: domains, the names of those to draw from; None: all."""
        return interleaved([part.next() for name, part in self._parts.items() if domains is None or name in domains])

    def learned(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """No-op: the order is fixed by the seed."""
        return {}

    def state(self) -> dict[str, Any]:
        return {"domains": {name: part.state() for name, part in self._parts.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after ``state``.

        Raises: ConfigError when the state belongs to other domains, or to another order of their rows.
        """
        saved = state.get("domains", {})
        if list(saved) != list(self._parts):
            what = f"the saved position is of the domains {', '.join(saved) or 'none'}, and this run has {', '.join(self._parts)}"
            raise ConfigError(
                Problem(what, fix="use the domains the run began with, or start a new run", field="data.domains")
            )
        for name, part in self._parts.items():
            part.restore(saved[name])


def _of_domain(problem: Problem, name: str, domain: DomainConfig) -> Problem:
    """Say whose rows are too few."""
    return replace(
        problem,
        what=f"{problem.what} with the sources of the domain {name} ({', '.join(domain.sources)})",
        fix="give the domain a smaller part of the step, or add rows",
        field=f"data.domains.{name}.prompts_per_step",
    )


def interleaved(parts: Sequence[Sequence[T]]) -> list[T]:
    """Alternate between lists by their lengths: any first n items have each list's share of them, to within one."""
    total = sum(len(part) for part in parts)
    taken = [0] * len(parts)
    items: list[T] = []
    for number in range(1, total + 1):
        index = max(
            (index for index, part in enumerate(parts) if taken[index] < len(part)),
            key=lambda index: len(parts[index]) * number / total - taken[index],
        )
        items.append(parts[index][taken[index]])
        taken[index] += 1
    return items
