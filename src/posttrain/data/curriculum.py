"""A loader whose data sources have shares of every step that follow their success rates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posttrain.config.curriculum import CurriculumConfig
from posttrain.data.domains import interleaved
from posttrain.data.loader import ShuffledLoader
from posttrain.errors import ConfigError, Problem
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason

SUCCESS = "success"  # metric of an episode


class CurriculumLoader:
    """A PromptLoader with a position in each source's rows.

    A source's weight is 1 at the target rate and falls evenly to 0 at the rates 0 and 1; one that was not drawn yet has weight
    1. Shares are proportional to the weights within the bounds. Fractions of prompts are carried to the next step, so that
    after any number of steps a source has had the sum of its shares to within one prompt.

    Raises: ConfigError when the bounds leave no shares that add up to 1.
    """

    def __init__(
        self, prompts: Sequence[Prompt], per_step: int, curriculum: CurriculumConfig, *, seed: int, shuffle: bool
    ):
        rows: dict[str, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            rows[prompt.data_source].append(prompt)
        self._settings = curriculum
        self._per_step = per_step
        self._parts = {name: ShuffledLoader(rows[name], 1, seed=seed, shuffle=shuffle) for name in sorted(rows)}
        self._rates: dict[str, float] = {}  # of the sources that were drawn
        self._owed = dict.fromkeys(self._parts, 0.0)  # prompts
        sources = len(self._parts)
        for value, field, bad in (
            (curriculum.least_share, "least_share", curriculum.least_share * sources > 1 + 1e-9),
            (curriculum.most_share, "most_share", curriculum.most_share * sources < 1 - 1e-9),
        ):
            if bad:
                what = f"{sources} data sources with a {field} of {value:g} each do not add up to a step"
                limit = f"at {'most' if field == 'least_share' else 'least'} {1 / sources:.3g}"
                raise ConfigError(Problem(what, fix=f"set it {limit}", field=f"data.curriculum.{field}"))

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps in which as many prompts are drawn as there are rows."""
        return max(1, sum(part.steps_per_epoch for part in self._parts.values()) // self._per_step)

    @property
    def epochs(self) -> float:
        """Return the passes over the rows of the source that has begun most of them."""
        return max(part.epochs for part in self._parts.values())

    def shares(self) -> dict[str, float]:
        """Return the share of every source in the next step."""
        target = self._settings.target
        weights = {
            name: 1.0 if rate is None else min(rate / target, (1 - rate) / (1 - target))
            for name, rate in ((name, self._rates.get(name)) for name in self._parts)
        }
        return bounded(weights, self._settings.least_share, self._settings.most_share)

    def next(self, domains: Collection[str] | None = None) -> list[Prompt]:
        """Return the prompts of the next step. There are no domains to choose from."""
        for name, share in self.shares().items():
            self._owed[name] += share * self._per_step
        counts = {name: max(0, math.floor(owed)) for name, owed in self._owed.items()}
        for _ in range(self._per_step - sum(counts.values())):
            counts[max(counts, key=lambda name: self._owed[name] - counts[name])] += 1
        while sum(counts.values()) > self._per_step:
            counts[
                min((name for name in counts if counts[name]), key=lambda name: self._owed[name] - counts[name])
            ] -= 1
        for name, count in counts.items():
            self._owed[name] -= count
        return interleaved([[self._parts[name].next()[0] for _ in range(count)] for name, count in counts.items()])

    def learned(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Take in the success of a step. Returns: the rate and the next share of every source, as metrics."""
        found: dict[str, list[bool]] = defaultdict(list)
        for group in groups:
            found[group.group.prompt.data_source] += self._successes(group)
        for name, successes in found.items():
            rate = sum(successes) / len(successes)
            before = self._rates.get(name, rate)
            self._rates[name] = self._settings.memory * before + (1 - self._settings.memory) * rate
        metrics = {f"curriculum/{name}/success_rate": rate for name, rate in sorted(self._rates.items())}
        return metrics | {f"curriculum/{name}/share": share for name, share in self.shares().items()}

    def _successes(self, group: ScoredGroup) -> list[bool]:
        found = []
        for trajectory, outcome in group.pairs:
            reported = dict(trajectory.env_metrics).get(SUCCESS)
            if trajectory.stop_reason is StopReason.FAILED or not isinstance(outcome, Reward):
                found.append(False)
            elif reported is not None:
                found.append(reported >= 1.0)
            else:
                found.append(outcome.value >= self._settings.success_score)
        return found

    def state(self) -> dict[str, Any]:
        return {
            "sources": {name: part.state() for name, part in self._parts.items()},
            "success_rates": dict(self._rates),
            "owed": dict(self._owed),
            "prompts_per_step": self._per_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after ``state``.

        Raises: ConfigError when the state belongs to other sources, or to another order of their rows.
        """
        saved = state.get("sources", {})
        if sorted(saved) != list(self._parts) or state.get("prompts_per_step") != self._per_step:
            names = ", ".join(sorted(saved)) or "none"
            what = f"the saved position is of the sources {names} with {state.get('prompts_per_step')} prompts per step, and "
            what += f"this run has {', '.join(self._parts)} with {self._per_step}"
            fix = "use the files and settings the run began with, or start a new run"
            raise ConfigError(Problem(what, fix=fix, field="data.curriculum"))
        for name, part in self._parts.items():
            part.restore(saved[name])
        self._rates = {name: float(rate) for name, rate in state["success_rates"].items()}
        self._owed = {name: float(state["owed"][name]) for name in self._parts}


def bounded(weights: Mapping[str, float], least: float, most: float) -> dict[str, float]:
    """Return shares that add up to 1, proportional to the weights, but each from ``least`` to ``most``: those that would be
    beyond a bound have it, and the others share the rest. Equal weights where all are 0."""
    fixed: dict[str, float] = {}
    while True:
        free = [name for name in weights if name not in fixed]
        rest = 1.0 - sum(fixed.values())
        total = sum(weights[name] for name in free)
        found = {name: rest * (weights[name] / total if total > 0 else 1 / len(free)) for name in free}
        low = {name: least for name, share in found.items() if share < least}
        high = {name: most for name, share in found.items() if share > most}
        # One side at a time: the side with more to hand over is bounded for certain.
        lacking = sum(least - found[name] for name in low)
        beyond = sum(found[name] - most for name in high)
        if not low and not high:
            shares = fixed | found
            return {name: shares[name] for name in weights}
        fixed |= low if lacking > beyond or not high else high
        if len(fixed) == len(weights):
            return {name: fixed[name] for name in weights}
