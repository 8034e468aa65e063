"""Advantages, KL and dynamic sampling."""

from __future__ import annotations

import math
from typing import Any

from posttrain.dialects.plugged import own_path, settings_of_own
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get
from posttrain.errors import did_you_mean
from posttrain.registry import ADVANTAGES

_ALGORITHM = "trainer.algorithm"
ESTIMATORS = {"reinforce++": "reinforce_plus_plus"}
THEIR_ESTIMATORS = ("grpo", "gae", "rloo", "reinforce++", "maxrl")
# Settings of estimators: their key -> our field, and its name among the estimator's settings.
_SETTINGS = {
    "grpo_norm_by_std": ("advantage.normalize_by_std", "normalize_by_std"),
    "gamma": ("advantage.gamma", "gamma"),
    "lambd": ("advantage.gae_lambda", "gae_lambda"),
}


def estimator_name(keys: Reader) -> str:
    """Our name of the advantage estimator."""
    name = keys[f"{_ALGORITHM}.advantage_estimator"]
    return ESTIMATORS.get(name, name)


def uses_critic(keys: Reader) -> bool:
    """Return True when the estimator needs values, and so a critic, or can read those of one that is there."""
    name = keys[f"{_ALGORITHM}.advantage_estimator"]
    needed, optional = reads_values(keys)
    if optional:
        return bool(keys["trainer.critic.model.path"])
    if needed and not keys["trainer.critic.model.path"]:
        key, path = "trainer.critic.model.path", keys["trainer.policy.model.path"]
        keys.problem(f"{name} needs a critic, and {key} is null", key=key, fix=f"use {key}={path}")
    return needed


def reads_values(keys: Reader) -> tuple[bool, bool]:
    """Tell whether the estimator reads values, and whether it can do without."""
    ours = estimator_name(keys)
    path = None if ADVANTAGES.is_built_in(ours) else own_path(keys, "advantage.name", ours)
    about = ADVANTAGES.known(ours, path)
    return "values" in about.inputs, "values" in about.optional


def advantages(keys: Reader) -> dict[str, Any]:
    """The estimator and its settings."""
    key = f"{_ALGORITHM}.advantage_estimator"
    name, ours = keys[key], estimator_name(keys)
    if own := settings_of_own(keys, key, ours):
        return {"advantage.name": ours} | own
    if ours not in ADVANTAGES.names():
        known = [*THEIR_ESTIMATORS, *(own for own in ADVANTAGES.names() if own not in THEIR_ESTIMATORS)]
        what = f"there is no advantage estimator {name!r} (known: {', '.join(known)})"
        keys.problem(what, key=key, fix=did_you_mean(name, known, listed=True) or f"use {key}=grpo")
        return {}
    fields: dict[str, Any] = {"advantage.name": ours}
    read = ADVANTAGES.settings(ours)
    for setting, (field, argument) in _SETTINGS.items():
        if argument in read:
            fields[field] = get(keys, f"{_ALGORITHM}.{setting}")
        else:
            keys.ignore(f"{_ALGORITHM}.{setting}", f"{name} does not use it")
    if ours == "grpo" and keys["generator.n_samples_per_prompt"] == 1:
        fields["advantage.lone_sample_keeps_reward"] = True
    return fields


def kl(keys: Reader) -> dict[str, Any]:
    """KL in the loss or in the reward; empty without. SkyRL has one at a time."""
    in_loss, in_reward = keys[f"{_ALGORITHM}.use_kl_loss"], keys[f"{_ALGORITHM}.use_kl_in_reward"]
    coef = keys[f"{_ALGORITHM}.kl_loss_coef"]
    if in_loss and in_reward:
        key = f"{_ALGORITHM}.use_kl_in_reward"
        fix = f"use {_ALGORITHM}.use_kl_loss=false with {key}=true, or {key}=false"
        keys.problem("the KL goes into the loss (use_kl_loss) or into the reward, not both", key=key, fix=fix)
    if not in_reward:
        for name in ("type", "kl_target", "horizon"):
            keys.ignore(f"{_ALGORITHM}.kl_ctrl.{name}", "use_kl_in_reward is false")
    if not in_loss and not in_reward:
        for name in ("kl_loss_coef", "use_kl_estimator_k3", "use_abs_kl", "kl_estimator_type"):
            keys.ignore(f"{_ALGORITHM}.{name}", "neither use_kl_loss nor use_kl_in_reward")
        return {}
    if in_loss:
        return {"loss.kl_coef": coef, "loss.kl_estimator": _estimator(keys, in_loss=True)}
    fields = {"reward.kl.coef": max(0.0, coef), "reward.kl.estimator": _estimator(keys, in_loss=False)}
    return fields | _controller(keys)


def _controller(keys: Reader) -> dict[str, Any]:
    """Steering of the KL's weight; only with KL in the reward."""
    kind, target, horizon = (get(keys, f"{_ALGORITHM}.kl_ctrl.{name}") for name in ("type", "kl_target", "horizon"))
    if kind == "fixed":
        for name in ("kl_target", "horizon"):
            keys.ignore(f"{_ALGORITHM}.kl_ctrl.{name}", "kl_ctrl.type is fixed")
        return {}
    if not 1 <= horizon < math.inf or horizon != int(horizon):
        key = f"{_ALGORITHM}.kl_ctrl.horizon"
        what = f"{key} must be a whole number of sequences above 0, not {horizon}"
        keys.problem(what, key=key, fix=f"use {key}=10000")
        return {"reward.kl.target": target}
    return {"reward.kl.target": target, "reward.kl.horizon_sequences": int(horizon)}


def _estimator(keys: Reader, *, in_loss: bool) -> str:
    """Return the KL estimator: by kl_estimator_type, or by the two switches that it replaced."""
    k3, absolute, kind = (f"{_ALGORITHM}.{name}" for name in ("use_kl_estimator_k3", "use_abs_kl", "kl_estimator_type"))
    switches = [key for key in (k3, absolute) if keys.written(key)]
    of_august = get(keys, kind) is not None
    if of_august and keys.written(kind):
        for key in switches:
            keys.problem(f"{kind} took the place of {key}, and both are written", key=key, fix=f"remove {key}")
        return str(get(keys, kind))
    if of_august:  # August 2025, nothing written about the type: the switches go first
        return "abs" if keys[absolute] else "k3" if keys[k3] else str(keys[kind])
    if keys[k3]:
        keys.ignore(absolute, "use_kl_estimator_k3 goes first")
        return "k3"
    if in_loss:
        keys.ignore(absolute, "the KL in the loss does not read it (kl_estimator_type=abs does that)")
        return "k1"
    return "abs" if keys[absolute] else "k1"


def dynamic_sampling(keys: Reader) -> dict[str, Any]:
    """Return the handling of prompts without a signal; empty for none."""
    section = f"{_ALGORITHM}.dynamic_sampling"
    kind, batches = get(keys, f"{section}.type"), get(keys, f"{section}.max_sample_batches")
    drop = f"{_ALGORITHM}.zero_variance_filter"
    if kind != "replace":
        keys.ignore(f"{section}.min_replace_ratio", "dynamic_sampling.type is not replace")
    if kind is None:
        keys.ignore(f"{section}.max_sample_batches", "dynamic_sampling.type is null")
        return {"group_filter.strategy": "mask"} if get(keys, drop) else {}
    keys.ignore(drop, "dynamic sampling leaves no such prompts")
    fields: dict[str, Any] = {
        "group_filter.strategy": "refill" if kind == "filter" else "replace",
        "group_filter.max_batches": batches if batches > 0 else None,
    }
    return fields | (_replacing(keys, f"{section}.min_replace_ratio") if kind == "replace" else {})


def _replacing(keys: Reader, key: str) -> dict[str, Any]:
    """SkyRL continues with more than a share of the prompts, we with a share or more: the next larger number is required."""
    share, prompts = keys[key], keys["trainer.train_batch_size"]
    if prompts < 1:  # refused as a RunConfig
        return {}
    needed = math.floor(share * prompts) + 1 if share < math.inf else 0
    if not 0 < needed <= prompts:
        what = f"{key} must be a share from 0 to below 1, not {share:g}: replace needs more good prompts than that"
        keys.problem(what, key=key, fix=f"use {key}=0.3, or another share below 1")
        return {}
    return {"group_filter.min_kept_share": needed / prompts}
