"""Reward normalisation: ROLL's two keys of today and its three of mid-2025."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import text_none

_OLD = ("reward_norm", "reward_shift", "reward_scale")
_NEW = ("norm_mean_type", "norm_std_type")


def normalization(keys: Reader) -> dict[str, str]:
    """reward.normalize_mean and reward.normalize_std. grpo is group and group whatever is written, but for reward_shift."""
    old, new = _asked(keys, _OLD), _asked(keys, _NEW)
    if old and new:
        keys.problem(
            f"{' and '.join(old)} of mid-2025 and {' and '.join(new)} of today both say how rewards are normalised",
            key=old[0],
            fix="keep one of them",
        )
    grpo = keys["adv_estimator"] == "grpo"
    samples = keys["num_return_sequences_in_group"]
    if grpo:
        for key in (*_NEW, "reward_norm", "reward_scale"):
            keys.ignore(key, "grpo normalises by the group, in ROLL too")
        mean, std = "group", None if keys["reward_shift"] else "group"
    elif old:
        mean, std = _of_2025(keys)
    else:
        mean, std = text_none(keys["norm_mean_type"]), text_none(keys["norm_std_type"])
    for key, value in (
        ("norm_mean_type" if new else "reward_norm", mean),
        ("norm_std_type" if new else "reward_norm", std),
    ):
        if value == "group" and samples == 1 and not grpo:
            keys.problem(f"{key}=group compares the responses to a prompt, and there is 1", key=key,
                         fix=f"use {key}=batch, or num_return_sequences_in_group=8")  # fmt: skip
            return {"reward.normalize_mean": "none", "reward.normalize_std": "none"}
    return {"reward.normalize_mean": mean or "none", "reward.normalize_std": std or "none"}


def _asked(keys: Reader, names: tuple[str, ...]) -> list[str]:
    """Return the written keys that have an effect."""
    return [name for name in names if keys.written(name) and text_none(keys[name])]


def _of_2025(keys: Reader) -> tuple[Any, Any]:
    kind, shift, scale = text_none(keys["reward_norm"]), keys["reward_shift"], keys["reward_scale"]
    if kind is None:
        for key in ("reward_shift", "reward_scale"):
            keys.ignore(key, "reward_norm is not given")
        return None, None
    if shift and scale:
        keys.problem("reward_shift and reward_scale together leave nothing out", key="reward_shift",
                     fix="keep one of them, or none for both the mean and the deviation")  # fmt: skip
    if shift:
        return kind, None
    if scale and kind == "running":
        return None, kind
    if scale:
        keys.ignore("reward_scale", f"it has no effect with reward_norm={kind}, in ROLL too")
    return kind, kind
