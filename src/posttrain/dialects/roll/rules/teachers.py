"""On-policy distillation: alone (is_pure_opd), or beside rewards (use_opd)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.dialects.reader import Reader

TEACHERS = "distillation.teachers"
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
    found = _teachers(keys)
    if pure and mixed:
        keys.problem("is_pure_opd and use_opd are both true", key="is_pure_opd", fix="keep one of them")
    elif not found:
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


def _teachers(keys: Reader) -> dict[str, Any]:
    section = keys.section("teacher")
    named = {"teacher": section} if section and "model_args" in section else section
    found: dict[str, Any] = {}
    for name, worker in named.items():
        model = worker.get("model_args") if isinstance(worker, Mapping) else None
        path = model.get("model_name_or_path") if isinstance(model, Mapping) else None
        where = "teacher" if named is not section else f"teacher.{name}"
        keys.origins[f"{TEACHERS}.{name}.path"] = f"{where}.model_args.model_name_or_path"
        keys.origins[f"{TEACHERS}.{name}.coef"] = f"{where}.opd_kl_coef"
        if not path:
            keys.problem(
                f"the teacher {name} has no model", key=where, fix=f"give {where}.model_args.model_name_or_path"
            )
            continue
        coef = worker.get("opd_kl_coef")
        sources = worker.get("tag_included") or []
        found[str(name)] = {"path": path, "coef": 1.0 if coef is None else coef, "data_sources": list(sources)}
    return found
