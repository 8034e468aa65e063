"""On-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get

SECTION = "distillation"
LOSS = f"{SECTION}.distillation_loss"
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ONLY = "teacher_model"  # the entry of a single teacher, dropped beside others
_KEYS = (
    "loss_mode",
    "topk",
    "use_task_rewards",
    "distillation_loss_coef",
    "loss_max_clamp",
    "log_prob_min_clamp",
    "use_policy_gradient",
    "policy_loss_mode",
    "clip_ratio_low",
    "clip_ratio_high",
)


def distillation(keys: Reader, loss: Mapping[str, Any]) -> dict[str, Any]:
    """The teachers, the divergence and its part. Args: fields of the actor's policy loss."""
    if not get(keys, f"{SECTION}.enabled", False):
        for key in (f"{SECTION}.teacher_models", f"{SECTION}.teacher_key", *(f"{LOSS}.{name}" for name in _KEYS)):
            keys.ignore(key, f"{SECTION}.enabled is false")
        return {}
    mode = keys[f"{LOSS}.loss_mode"]
    rewards, as_advantage = keys[f"{LOSS}.use_task_rewards"], keys[f"{LOSS}.use_policy_gradient"]
    fields: dict[str, Any] = {
        "distillation.teachers": _teachers(keys),
        "distillation.with_rewards": rewards,
        "distillation.enters": "advantage" if as_advantage else "loss",
        "distillation.clip": keys[f"{LOSS}.loss_max_clamp"],
        "distillation.coef": keys[f"{LOSS}.distillation_loss_coef"] if rewards else 1.0,
    }
    if not rewards:
        keys.ignore(f"{LOSS}.distillation_loss_coef", "use_task_rewards is false")
    if mode == "forward_kl_topk":
        fields |= {
            "distillation.divergence": {"name": "forward_kl"},
            "distillation.top_k": keys[f"{LOSS}.topk"],
            "distillation.top_k_rest": "drop",
            "distillation.min_logprob": keys[f"{LOSS}.log_prob_min_clamp"],
        }
    else:
        estimator = ESTIMATORS.get(mode, mode)
        fields["distillation.divergence"] = {"name": "sampled_kl", "estimator": estimator}
        for name in ("topk", "log_prob_min_clamp"):
            keys.ignore(f"{LOSS}.{name}", f"loss_mode={mode} reads log-probs of the sampled tokens alone")
    return fields | _policy_loss(keys, loss, rewards=rewards, as_advantage=as_advantage)


def _policy_loss(keys: Reader, loss: Mapping[str, Any], *, rewards: bool, as_advantage: bool) -> dict[str, Any]:
    """The loss that reads the advantages: the actor's beside rewards, the distillation's own without."""
    ranges = {f"loss.{name}": keys[f"{LOSS}.{name}"] for name in ("clip_ratio_low", "clip_ratio_high")}
    if not as_advantage:
        for name in ("policy_loss_mode", "clip_ratio_low", "clip_ratio_high"):
            keys.ignore(f"{LOSS}.{name}", "use_policy_gradient is false")
        return {}
    if not rewards:
        return {"loss.name": "ppo_clip", **ranges}
    for field, value in ranges.items():
        key = f"{LOSS}.{field.removeprefix('loss.')}"
        if loss.get(field, value) != value:
            what = f"rewards and teachers share one policy loss, whose {field} is {loss[field]:g}, not {value:g}"
            keys.problem(what, key=key, fix=f"use {key}={loss[field]:g}")
    return {}


def _teachers(keys: Reader) -> dict[str, Any]:
    given = keys[f"{SECTION}.teacher_models"]
    found = dict(given) if isinstance(given, Mapping) else {}
    key = f"{SECTION}.teacher_models"
    if len(found) > 1:
        found.pop(ONLY, None)
    teachers: dict[str, Any] = {}
    for name, teacher in found.items():
        path = teacher.get("model_path") if isinstance(teacher, Mapping) else None
        if not path:
            keys.problem(f"the teacher {name} has no model", key=f"{key}.{name}", fix=f"give {key}.{name}.model_path")
            continue
        teachers[str(name)] = {"path": path}
        keys.origins[f"distillation.teachers.{name}.path"] = f"{key}.{name}.model_path"
        if len(found) > 1:
            source = teacher.get("key")
            if not source:
                what = f"the teacher {name} is one of several, and no data source is its own"
                keys.problem(what, key=f"{key}.{name}", fix=f"give {key}.{name}.key")
            teachers[str(name)]["data_sources"] = [source] if source else []
    if not found and key not in keys.bad:
        fix = f"give {key}.{ONLY}.model_path"
        keys.problem(f"{SECTION}.enabled is true, and no teacher is named", key=f"{SECTION}.enabled", fix=fix)
    return teachers
