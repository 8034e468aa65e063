"""The rules by which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A checkpoint stays when any of these rules wants it; with ``last`` None all stay."""

    last: int | None = None  # the newest so many
    best: int | None = None  # and so many with the best values of the metric
    metric: str | None = None  # by its name in metrics.jsonl
    mode: Literal["max", "min"] = "max"
    every: int | None = None  # and those of steps that this divides


def ranked(values: Mapping[int, float | None], mode: Literal["max", "min"]) -> list[int]:
    """Steps from the best value to the worst, of two equal ones the later first; steps without a finite value are left out."""
    sign = 1.0 if mode == "max" else -1.0
    known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    return sorted(known, key=lambda step: (sign * known[step], step), reverse=True)


def surplus(values: Mapping[int, float | None], rules: Retention, idle: Collection[int] = ()) -> list[int]:
    """The steps that may go, oldest first; the newest never does.

    Args: values of the metric by the step of each checkpoint there is, None where it was not measured; idle, those of them that
        made no update: they count neither among the last nor among the best.
    """
    if rules.last is None:
        return []
    steps = sorted(values)
    good = {step: values[step] for step in steps if step not in idle}
    kept = {*steps[-1:], *list(good)[-rules.last :], *ranked(good, rules.mode)[: rules.best or 0]}
    return [step for step in steps if step not in kept and not (rules.every and step % rules.every == 0)]
