"""Rules that take tokens or responses out of the loss because sampler and trainer disagree about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STATISTICS = ("k1", "k2", "k3", "difference")
REDUCTIONS = ("token", "sequence_sum", "sequence_mean", "sequence_max", "turn_mean")
SECOND_MOMENT = "step_m2"  # M2PO: over all tokens of a step
RULES = (*(f"{reduction}_{statistic}" for reduction in REDUCTIONS for statistic in STATISTICS), SECOND_MOMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """See algos.rollout_correction.rejection_mask."""

    statistic: str  # of STATISTICS, or m2
    reduction: str  # of REDUCTIONS, or step
    # A ratio for k1, nats for k2 and k3, squared nats for m2, a difference of probabilities for difference.
    high: float
    low: float | None = None  # for k1, a ratio, None: 1 / high; for difference, None: -high


def rejection_rules(names: Sequence[str], bounds: Sequence[str]) -> tuple[RejectionRule, ...]:
    """The rules with their bounds: one bound for all of them, or one for each.

    Raises: ValueError, saying what is wrong and with which rule.
    """
    if names and len(bounds) not in (1, len(names)):
        raise ValueError(f"{len(names)} rules have {len(bounds)} bounds; give one for all, or one for each")
    spread = list(bounds) * len(names) if len(bounds) == 1 else bounds
    return tuple(_rule(name, bound) for name, bound in zip(names, spread, strict=True)) if names else ()


def _rule(name: str, bound: str) -> RejectionRule:
    """The rule called ``name`` (of RULES) with a bound such as "2", or for k1 "0.5_2", or for difference "-0.2_0.2"."""
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r} (known: {', '.join(RULES)})")
    reduction, _, statistic = name.rpartition("_")
    lower, _, upper = str(bound).rpartition("_")
    try:
        low, high = float(lower) if lower else None, float(upper)
    except ValueError:
        raise ValueError(f"the bound of {name} is {bound!r}, and a number, or lower_upper, is expected") from None
    if statistic == "difference":
        lowest = -high if low is None else low
        if not (math.isfinite(lowest) and math.isfinite(high) and lowest < high):
            raise ValueError(f"the bounds of {name} leave nothing: from {lowest:g} to {high:g}")
        return RejectionRule(statistic=statistic, reduction=reduction, high=high, low=low)
    if not all(math.isfinite(each) and each > 0 for each in (high, low) if each is not None):
        raise ValueError(f"the bound of {name} is {bound!r}, and bounds are above 0")
    if statistic != "k1" and low is not None:
        raise ValueError(f"{name} is never negative and has an upper bound only, not {bound!r}")
    if statistic == "k1" and (1 / high if low is None else low) > high:
        what = (
            f"{1 / high:g} to {high:g} (a single bound u of k1 is 1/u to u)" if low is None else f"{low:g} to {high:g}"
        )
        raise ValueError(f"the bounds of {name} leave nothing: from {what}")
    return RejectionRule(statistic=statistic, reduction=reduction, high=high, low=low)
