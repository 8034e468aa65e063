"""On-policy distillation: alone (is_pure_opd), or beside rewards (use_opd)."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.teacher_workers import (
    COEF,
    DEVICES,
    PATH,
    TAGS,
    teacher_devices,
    teacher_sections,
    teacher_values,
)

TEACHERS = "distillation.teachers"
_BATCH = "infer_batch_size"
_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2"}
# Settings of rewards' advantages, which teachers alone do not read.
_OF_REWARDS = (
    "advantage.name",
    "advantage.gamma",
    "advantage.whiten_rewards",
    "advantage.normalize_by_std",
    "reward.normalize",
)


def prepare(keys: Reader) -> None:
    """Let the rules that follow read what ROLL sets for distillation alone."""
    if keys["is_pure_opd"]:
        fixed = {"adv_estimator": "reinforce", "use_kl_loss": False, "add_token_level_kl": False, "critic_warmup": 0}
        for key, value in fixed.items():
            keys.put(key, value)


def teachers(keys: Reader, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the teachers; unchanged without distillation."""
    pure, mixed = keys["is_pure_opd"], keys["use_opd"]
    if not pure and not mixed:
        for key in ("teacher", "pure_opd_pipeline_type"):
            keys.ignore(key, "neither is_pure_opd nor use_opd is true")
        return fields
    found = _teachers(keys, fields.get("policy.devices"))
    if pure and mixed:
        keys.problem("is_pure_opd and use_opd are both true", key="is_pure_opd", fix="keep one of them")
    elif not found and not teacher_sections(keys):
        keys.problem("there is no teacher", key="is_pure_opd" if pure else "use_opd",
                     fix="give teacher.model_args.model_name_or_path")  # fmt: skip
    penalty = keys["kl_penalty"]
    keys.ignored = [each for each in keys.ignored if each.key != "kl_penalty"]
    sampled = {"name": "sampled_kl", "estimator": _ESTIMATORS.get(penalty, penalty)}
    if pure:
        fields = {name: value for name, value in fields.items() if not name.startswith(_OF_REWARDS)}
    return fields | {
        TEACHERS: found,
        "distillation.divergence": {"name": "reverse_kl"} if penalty == "full" else sampled,
        "distillation.enters": "advantage",
        "distillation.with_rewards": bool(mixed),
    }


def _teachers(keys: Reader, policy: list[int] | None) -> dict[str, Any]:
    """Args: policy, the devices of the policy, which teachers without a device_mapping share; None where it has all."""
    found: dict[str, Any] = {}
    placed = teacher_devices(keys)
    for name, (at, worker) in teacher_sections(keys).items():
        values = teacher_values(keys, at, worker, like="reference", read=(PATH, DEVICES, COEF, TAGS, _BATCH))
        origins = {"path": PATH, "coef": COEF, "devices": DEVICES, "sequences_per_micro_batch_per_device": _BATCH}
        keys.origins |= {f"{TEACHERS}.{name}.{field}": f"{at}.{key}" for field, key in origins.items()}
        if not values.get(PATH):
            if f"{at}.{PATH}" not in keys.bad:
                keys.problem(f"the teacher {name} has no model", key=at, fix=f"give {at}.{PATH}")
            continue
        coef = values.get(COEF)
        found[name] = {
            "path": values[PATH],
            "coef": 1.0 if coef is None else coef,
            "data_sources": values.get(TAGS) or [],
        }
        if (devices := placed.get(name, policy)) is not None:
            found[name]["devices"] = devices
        if _BATCH in values:
            found[name]["sequences_per_micro_batch_per_device"] = values[_BATCH]
    return found
