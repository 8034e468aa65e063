"""Small questions that several rules ask."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.heads import refuse_joint_heads
from posttrain.dialects.ledger import ABSENT, leaves
from posttrain.dialects.reader import Reader

CONFIG = "strategy_args.strategy_config"


def uses_critic(keys: Reader) -> bool:
    """gae, and nothing else, has a critic."""
    return bool(keys["adv_estimator"] == "gae") and not samples_only(keys)


def samples_only(keys: Reader) -> bool:
    """Return True for a pipeline that plays episodes and trains nothing: only the sampler has devices."""
    trained = any(keys.written(f"actor_train.{name}") for name in ("device_mapping", "strategy_args", "training_args"))
    return is_agentic(keys) and keys.written("actor_infer.device_mapping") and not trained


def uses_reference(keys: Reader) -> bool:
    """Return True when the run needs a KL. (ROLL also loads a reference whenever init_kl_coef is above 0, without using it.)"""
    if samples_only(keys):
        return False
    in_reward = keys["add_token_level_kl"] and keys["init_kl_coef"] > 0
    return bool(in_reward or (keys["use_kl_loss"] and keys["kl_loss_coef"] > 0))


def is_agentic(keys: Reader) -> bool:
    return any(keys.written(key) for key in ("custom_envs", "train_env_manager", "val_env_manager"))


def plain(keys: Reader, section: str) -> dict[str, Any]:
    """The fields of a section's keys that need no more than a change of value, once the section is used."""
    fields: dict[str, Any] = {}
    for row in keys.ledger.rows:
        if row.if_used and row.name.startswith(f"{section}."):
            value = keys[row.name]
            fields |= dict.fromkeys(row.fields, row.to(value) if row.to else value)
    return {field: value for field, value in fields.items() if value is not None or field.endswith("warmup_updates")}


def warmup(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The share of warm-up, rounded up as transformers does; and how slowly its inverse_sqrt falls where there is no warm-up: it
    takes the warm-up's steps otherwise."""
    refuse_joint_heads(keys, f"{section}.mtp_training_mode")
    args = f"{section}.training_args"
    steps, ratio = keys[f"{args}.warmup_steps"], keys[f"{args}.warmup_ratio"]
    fields: dict[str, Any] = {f"{role}.schedule.warmup_ratio": ratio}
    if ratio and not steps:
        fields[f"{role}.schedule.warmup_rounding"] = "up"
    elif not steps and keys[f"{args}.lr_scheduler_type"] == "inverse_sqrt":
        fields[f"{role}.schedule.timescale_updates"] = 10_000
    return fields | _shape(keys, args, role)


def _shape(keys: Reader, args: str, role: str) -> dict[str, Any]:
    """The floor of the learning rate and its waves, which ROLL hands on to transformers and Megatron."""
    key, kind = f"{args}.lr_scheduler_kwargs", keys[f"{args}.lr_scheduler_type"]
    given = {name: value for name, value in (keys[key] or {}).items() if value is not None}
    known = {"min_lr", "min_lr_rate"} | ({"num_cycles"} if kind == "cosine" else set())
    for name in sorted(given.keys() - known):
        keys.problem(f"{key}.{name} has no meaning for {kind} here", key=f"{key}.{name}",
                     fix=f"use {' or '.join(sorted(known))}, or remove it", refused=True)  # fmt: skip
    wrong = [name for name in sorted(given.keys() & known) if not isinstance(given[name], int | float)]
    for name in wrong:
        keys.problem(f"{key}.{name} must be a number, not {given[name]!r}", key=f"{key}.{name}", fix=f"use {name}: 0.1")
    lr, fields = keys[f"{args}.learning_rate"], dict[str, Any]()
    if wrong or not lr > 0:
        return fields
    floor = given["min_lr"] / lr if "min_lr" in given else given.get("min_lr_rate")
    if floor is not None and not 0 <= floor <= 1:
        keys.problem(f"{key}: the lowest learning rate is {floor * lr:g}, and the highest {lr:g}", key=key,
                     fix=f"use a min_lr from 0 to {lr:g}")  # fmt: skip
    elif floor is not None and kind not in ("constant", "constant_with_warmup"):
        fields[f"{role}.schedule.min_lr_ratio"] = floor
    if "num_cycles" in given and kind == "cosine":
        fields[f"{role}.schedule.cycles"] = given["num_cycles"]
    return fields


def text_none(value: Any) -> Any:
    """ROLL's files write None, which YAML reads as a text."""
    return None if value == "None" else value


def count(keys: Reader, key: str) -> int:
    """A size that must be at least 1; complains and gives the default when it is not."""
    value = keys[key]
    if value < 1:
        default = _default(keys, key)
        keys.problem(f"{key} is {value}", key=key, fix=f"use at least 1, such as {key}={default}")
        keys.bad.add(key)
        return int(default)
    return int(value)


def _default(keys: Reader, key: str) -> Any:
    row = keys.ledger.find(key)
    shipped = row.default if row is not None else None
    return shipped if shipped is not ABSENT and isinstance(shipped, int) and shipped >= 1 else 1


def written_config(keys: Reader, section: str) -> dict[str, Any]:
    """Return the written entries of a role's strategy_config, by dotted name below it."""
    at = f"{section}.{CONFIG}"
    values = dict(leaves(keys.section(at)))
    return {
        name: value
        for name, value in values.items()
        if name and keys.written(f"{at}.{name}") and f"{at}.{name}" not in keys.bad
    }
