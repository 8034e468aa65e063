"""On-policy distillation as SkyRL's example of it: advantage_estimator no_op, with the reference as the teacher."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get

_ALGORITHM = "trainer.algorithm"
_MICRO = "trainer.micro_forward_batch_size_per_gpu"
NO_OP = "no_op"
_OF_KL = ("kl_loss_coef", "use_kl_estimator_k3", "use_abs_kl", "kl_estimator_type")


def teachers(keys: Reader) -> dict[str, Any]:
    """The teacher, whose log-prob less the policy's is the advantage of every token; empty with another estimator."""
    estimator = f"{_ALGORITHM}.advantage_estimator"
    if keys[estimator] != NO_OP:
        return {}
    path, switch = get(keys, "trainer.ref.model.path"), f"{_ALGORITHM}.use_kl_in_reward"
    if not path or path == keys["trainer.policy.model.path"]:
        what = f"{estimator}={NO_OP} learns from the reference as a teacher, and the reference is the policy itself"
        keys.problem(what, key=estimator, fix="name the teacher: trainer.ref.model.path=FOLDER")
    keys.origins["distillation.teachers.ref.path"] = "trainer.ref.model.path"
    if not keys[switch] or keys[f"{_ALGORITHM}.use_kl_loss"]:
        what = f"{estimator}={NO_OP} takes the KL to the teacher as the advantage"
        keys.problem(what, key=estimator, fix=f"use {switch}=true and {_ALGORITHM}.use_kl_loss=false")
    for name in _OF_KL:
        keys.ignore(f"{_ALGORITHM}.{name}", f"{NO_OP} takes log pi - log pi_teacher, with the weight 1")
    for name in ("type", "kl_target", "horizon"):
        keys.ignore(f"{_ALGORITHM}.kl_ctrl.{name}", f"{NO_OP} has the weight 1")
    for name in ("grpo_norm_by_std", "gamma", "lambd"):
        keys.ignore(f"{_ALGORITHM}.{name}", f"{NO_OP} does not use it")
    keys.origins["distillation.teachers.ref.sequences_per_micro_batch_per_device"] = _MICRO
    teacher = {
        "path": path or keys["trainer.policy.model.path"],
        "sequences_per_micro_batch_per_device": keys[_MICRO],
    }
    return {
        "distillation.teachers": {"ref": teacher},
        "distillation.divergence": {"name": "sampled_kl", "estimator": "k1"},
        "distillation.enters": "advantage",
    }


def on_devices(teaching: dict[str, Any], places: dict[str, Any]) -> dict[str, Any]:
    """Give the teacher the devices of SkyRL's reference, which are taken out of ``places``; those of the policy by default."""
    devices = places.pop("reference.devices", places.get("policy.devices"))
    ((name, teacher),) = teaching["distillation.teachers"].items()
    placed = teacher if devices is None else teacher | {"devices": devices}
    return teaching | {"distillation.teachers": {name: placed}}
