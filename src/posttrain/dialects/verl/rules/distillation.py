"""On-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.dialects.reader import HYDRA_CLASS, Reader
from posttrain.dialects.value_types import fits, parse_type
from posttrain.dialects.verl.rules.gkd import gkd, is_gkd
from posttrain.dialects.verl.rules.look import get
from posttrain.errors import did_you_mean

SECTION = "distillation"
LOSS = f"{SECTION}.distillation_loss"
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ONLY = "teacher_model"  # the entry of a single teacher, dropped beside others
_POOL = ("teacher_models", "teacher_key", "nnodes", "n_gpus_per_node")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
_OF_A_TEACHER = {
    HYDRA_CLASS: "text",
    "key": "text | null",
    "model_path": "text | null",
    "num_replicas": "int from 0 up to 10000 | null",
    "inference": "section | null",
}
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


def distillation(
    keys: Reader, loss: Mapping[str, Any], pool: Sequence[int], beside: list[int] | None
) -> dict[str, Any]:
    """The teachers, the divergence and its part.

    Args: loss, the fields of the actor's policy loss; pool, devices of the teachers alone, and beside, those of the policy,
        which teachers without a pool share; None where the policy has all.
    """
    if not get(keys, f"{SECTION}.enabled", False):
        for key in (*(f"{SECTION}.{name}" for name in _POOL), *(f"{LOSS}.{name}" for name in _KEYS)):
            keys.ignore(key, f"{SECTION}.enabled is false")
        return gkd(keys) if is_gkd(keys) else {}
    mode = keys[f"{LOSS}.loss_mode"]
    rewards, as_advantage = keys[f"{LOSS}.use_task_rewards"], keys[f"{LOSS}.use_policy_gradient"]
    fields: dict[str, Any] = {
        "distillation.teachers": _teachers(keys, pool, beside),
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


def _teachers(keys: Reader, pool: Sequence[int], beside: list[int] | None) -> dict[str, Any]:
    given = keys[f"{SECTION}.teacher_models"]
    found = dict(given) if isinstance(given, Mapping) else {}
    key = f"{SECTION}.teacher_models"
    if len(found) > 1:
        found.pop(ONLY, None)
    teachers: dict[str, Any] = {}
    for name, teacher in found.items():
        at = f"{key}.{name}"
        values = _values(keys, at, teacher) if isinstance(teacher, Mapping) else {}
        path = values.get("model_path")
        if not path:
            keys.problem(f"the teacher {name} has no model", key=at, fix=f"give {at}.model_path")
            continue
        teachers[str(name)] = {"path": path} | ({"devices": beside} if beside is not None and not pool else {})
        keys.origins[f"distillation.teachers.{name}.path"] = f"{at}.model_path"
        keys.origins[f"distillation.teachers.{name}.devices"] = f"{SECTION}.n_gpus_per_node"
        if len(found) > 1:
            source = values.get("key")
            if not source:
                what = f"the teacher {name} is one of several, and no data source is its own"
                keys.problem(what, key=at, fix=f"give {at}.key")
            teachers[str(name)]["data_sources"] = [source] if source else []
    if pool and len(teachers) == len(found):
        _share_out(keys, teachers, found, pool)
    elif not pool:
        keys.ignore(f"{SECTION}.n_gpus_per_node", f"{SECTION}.nnodes is 0: teachers work on the policy's devices")
    if not found and key not in keys.bad:
        fix = f"give {key}.{ONLY}.model_path"
        keys.problem(f"{SECTION}.enabled is true, and no teacher is named", key=f"{SECTION}.enabled", fix=fix)
    return teachers


def _values(keys: Reader, at: str, teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a teacher, of the types that verl gives them; the others are reported and left out."""
    values: dict[str, Any] = {}
    for name, value in teacher.items():
        type_ = _OF_A_TEACHER.get(name)
        if type_ is None:
            keys.problem(f"a teacher has no key {name}", key=f"{at}.{name}", fix=did_you_mean(name, _OF_A_TEACHER))
        elif not fits(value, parse_type(type_)):
            keys.problem(f"{at}.{name} must be {type_}, not {value!r}", key=f"{at}.{name}")
        else:
            values[name] = value
    for name in values.get("inference") or ():
        if name not in _SIZES:
            keys.ignore(f"{at}.inference.{name}", "teachers are computed by training engines")
    return values


def _share_out(keys: Reader, teachers: dict[str, Any], given: Mapping[str, Any], pool: Sequence[int]) -> None:
    """Give every teacher its devices: the pool, which several divide by num_replicas x the sizes of their copies, as in verl."""
    sizes = [_devices_of(given[name]) for name in teachers] if len(teachers) > 1 else [len(pool)]
    if sum(sizes) != len(pool):
        counted = ", ".join(f"{name} {size}" for name, size in zip(teachers, sizes, strict=True))
        what = f"the teachers have {len(pool)} devices, and num_replicas x tensor_model_parallel_size of each are {counted}"
        keys.problem(what, key=f"{SECTION}.n_gpus_per_node", fix=f"use {sum(sizes)} devices, or other num_replicas")
        return
    used = 0
    for teacher, size in zip(teachers.values(), sizes, strict=True):
        teacher["devices"] = list(pool[used : used + size])
        used += size


def _devices_of(teacher: Mapping[str, Any]) -> int:
    """Devices of a teacher beside others: its replicas, times what one takes."""
    inference = teacher.get("inference") or {}
    size: int = teacher.get("num_replicas") or 1
    for name in _SIZES:
        size *= inference.get(name) or 1
    return size
