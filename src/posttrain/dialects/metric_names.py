"""Metrics under the names that users of a dialect know them by, beside ours.

A dialect's table (dialects/NAME/metrics.py) has a row per name of theirs: our metric of the same definition, or how theirs is
computed from ours. A name whose definition ours cannot meet in a run (another mean, a part that is not logged) is left out
there: a dashboard rather misses a curve than shows another one under its name.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.config.tracking import SERVICES

VALIDATION = re.compile(r"validation/(.+)/(\w+)(?:@(\d+))?")


class Absent(Exception):
    """A metric that this step, or this run, does not have."""


class Step:
    """The metrics of one step, and the settings of its run."""

    def __init__(self, number: int, metrics: Mapping[str, float], config: Mapping[str, Any]):
        self.number = number
        self._metrics = metrics
        self._config = config

    def __getitem__(self, metric: str) -> float:
        """One of our metrics. Raises Absent."""
        if metric not in self._metrics:
            raise Absent(metric)
        return self._metrics[metric]

    def setting(self, key: str) -> Any:
        """A setting by its dotted name. Raises Absent for one that this kind of run does not have."""
        node: Any = self._config
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                raise Absent(key)
            node = node[part]
        return node

    def validations(self) -> list[tuple[str, str, int | None, float]]:
        """Data source, name and k of every metric of a validation: ("gsm8k", "reward_best", 4, 0.7)."""
        found = ((VALIDATION.fullmatch(name), value) for name, value in self._metrics.items())
        return [(match[1], match[2], int(match[3]) if match[3] else None, value) for match, value in found if match]


Formula = str | Callable[[Step], float]
Many = Callable[[Step], Mapping[str, float]]  # names that hold a data source


def tracking(trackers: Sequence[str], dialect: str) -> dict[str, Any]:
    """The trackers that a file of a dialect asks for, once each, and its names for metrics where a service is among them."""
    chosen = list(dict.fromkeys(trackers))
    names = {"tracking.dialect_names": dialect} if set(SERVICES) & set(chosen) else {}
    return {"tracking.trackers": chosen, **names}


def with_dialect_names(
    number: int, metrics: Mapping[str, float], config: Mapping[str, Any], dialect: str | None
) -> dict[str, float]:
    """The metrics of a step, and those that the dialect has a name for under that name too. A name of ours stays ours."""
    if dialect is None:
        return dict(metrics)
    table = importlib.import_module(f"posttrain.dialects.{dialect}.metrics")
    return {**named(Step(number, metrics, config), table.NAMES, table.VALIDATION), **metrics}


def named(step: Step, names: Mapping[str, Formula], many: Iterable[Many]) -> dict[str, float]:
    """Every name of a table that this step has a value for."""
    found: dict[str, float] = {}
    for name, formula in names.items():
        try:
            found[name] = step[formula] if isinstance(formula, str) else float(formula(step))
        except (Absent, ZeroDivisionError):
            continue
    for rows in many:
        with suppress(Absent):
            found |= rows(step)
    return found


def without(key: str, formula: Formula) -> Formula:
    """The formula, in runs in which a coefficient is 0 (or a choice is none or null); absent in others."""

    def value(step: Step) -> float:
        if step.setting(key) not in (0, None, "none", False):
            raise Absent(key)
        return step[formula] if isinstance(formula, str) else formula(step)

    return value


def token_mean(metric: str, aggregated_by: str = "") -> Formula:
    """A mean over tokens, in runs that aggregate it so: by the loss's aggregation, or where it is not null the setting
    ``aggregated_by``. Other runs log another number, which is not ours to know."""

    def value(step: Step) -> float:
        own = step.setting(aggregated_by) if aggregated_by else None
        if (own or step.setting("loss.aggregation")) != "token_mean":
            raise Absent(metric)
        return step[metric]

    return value


def policy_loss(step: Step) -> float:
    """The policy loss without entropy bonus and KL: of runs that average over tokens, or have neither."""
    if step.setting("loss.aggregation") == "token_mean":
        return step["policy/pg_loss"]
    if any(step.setting(f"loss.{name}") for name in ("entropy_coef", "kl_coef", "sft_coef")):
        raise Absent("policy/pg_loss")
    return step["policy/loss"]


def rewards_for_training(metric: str) -> Formula:
    """A statistic of the rewards that training sees: of runs that change them no further after the scorer."""
    untouched: Formula = metric
    for key in ("reward.kl.coef", "reward.clip", "reward.normalize_mean", "reward.normalize_std"):
        untouched = without(key, untouched)
    return untouched


def tokens_of_step(step: Step) -> float:
    """Prompt and response tokens of the step; every prompt counts for each of its responses."""
    return step["step/response_tokens"] + step["prompt/length_mean"] * step["step/sequences"]


def epoch_from_0(step: Step) -> float:
    """The pass over the data that the step belongs to, the first being 0."""
    return max(0, -int(-step["progress/epoch"] // 1) - 1)
