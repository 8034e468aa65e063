"""The rollout correction as verl 0.6.0, 0.6.1 and 0.7 write it, in the later words."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get

SECTION = "algorithm.rollout_correction"
# rollout_rs of 0.6: bounds of pi_old / pi_rollout, of a token, of the product over a response, of its geometric mean.
LEVELS = {"token": "token_k1", "sequence": "sequence_sum_k1", "geometric": "sequence_mean_k1"}
VETO = "sequence_max_k1"  # asks a bound of every token of a response
NO_BOUND = "1e-30"
WEIGHTS = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}

# 0.6.0 alone: keys of the section algorithm itself.
FIRST = "algorithm.rollout_is"
FIRST_KEYS = ("_threshold_lower", "_level", "_mode", "_veto_threshold")
OURS = "loss.rollout_correction"


def first_correction(keys: Reader) -> dict[str, Any]:
    """The correction as 0.6.0 writes it; empty where it is off: without a threshold, or with rollout_is false, which only
    measures. Source: verl 0.6.0, mismatch_helper.py."""
    high = get(keys, f"{FIRST}_threshold")
    if high is None or not get(keys, FIRST, False):
        reason = "without a threshold there is no correction" if high is None else "rollout_is is false: measured only"
        for name in FIRST_KEYS if high is None else ("_threshold", *FIRST_KEYS):
            keys.ignore(f"{FIRST}{name}", reason)
        return {}
    fields: dict[str, Any] = {
        f"{OURS}.weights": WEIGHTS[get(keys, f"{FIRST}_level", "token")],
        f"{OURS}.weight_high": high,
    }
    if get(keys, f"{FIRST}_mode", "truncate") == "mask":
        fields[f"{OURS}.weight_low"] = get(keys, f"{FIRST}_threshold_lower", 1 / high if high > 0 else None)
    else:
        keys.ignore(f"{FIRST}_threshold_lower", "read with rollout_is_mode=mask only")
    veto = get(keys, f"{FIRST}_veto_threshold")
    if veto is not None and veto > 0:
        fields |= {f"{OURS}.reject": [VETO], f"{OURS}.reject_bounds": [f"{NO_BOUND}_{1 / veto!r}"]}
    elif veto is not None:
        _not_above_zero(keys, f"{FIRST}_veto_threshold", veto)
    return fields


def _not_above_zero(keys: Reader, key: str, veto: float) -> None:
    keys.problem(f"{key} is {veto}, and a ratio is above 0", key=key, fix=f"use {key}=1e-4, or null for none")


def early_rejections(keys: Reader) -> tuple[list[str], list[str]] | None:
    """Our rules and their bounds; None where the configuration does not write them as 0.6 does.

    0.6 bounds pi_old / pi_rollout, and our k1 is the logarithm of its inverse, so the bounds change places. Source: verl
    0.6.1, rollout_corr_helper.py.
    """
    level, veto = get(keys, f"{SECTION}.rollout_rs"), get(keys, f"{SECTION}.rollout_token_veto_threshold")
    if level not in LEVELS and (veto is None or level is not None):
        for name in ("rollout_rs_threshold_lower", "rollout_token_veto_threshold"):
            keys.ignore(f"{SECTION}.{name}", "read with rollout_rs of token, sequence or geometric")
        return None
    rules, bounds = [], []
    if level in LEVELS:
        pair = _bounds(keys)
        if pair is not None:
            rules.append(LEVELS[level])
            bounds.append(f"{1 / pair[1]!r}_{1 / pair[0]!r}")
    if veto is not None and veto > 0:
        rules.append(VETO)
        bounds.append(f"{NO_BOUND}_{1 / veto!r}")
    elif veto is not None:
        _not_above_zero(keys, f"{SECTION}.rollout_token_veto_threshold", veto)
    return rules, bounds


def _bounds(keys: Reader) -> tuple[float, float] | None:
    """The bounds of pi_old / pi_rollout; None where they are refused."""
    high: Any = get(keys, f"{SECTION}.rollout_rs_threshold")
    high = get(keys, f"{SECTION}.rollout_is_threshold", 2.0) if high is None else high
    low: Any = get(keys, f"{SECTION}.rollout_rs_threshold_lower")
    key = f"{SECTION}.rollout_rs_threshold"
    if isinstance(high, str | list) or high <= 0:
        keys.problem(f"{key} is {high!r}, and rollout_rs=token, sequence and geometric have one number", key=key)
        return None
    low = 1 / high if low is None else low
    if not 0 < low <= high:
        what = f"no ratio is between {low:g} and {high:g}"
        keys.problem(what, key=f"{key}_lower", fix=f"use {key}_lower={1 / high:g}, or null")
        return None
    return low, high
