"""Settings that have another name, or another section, in later versions of verl."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.reader import Reader, same
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, REF
from posttrain.dialects.verl.strategies import MEGATRON, MINDSPEED

_ONE_TEACHER = "distillation.teacher_model"
_MIGRATED = "reward."  # verl replaces what its own files hold here by what is written under the earlier names
_ITS_DEVICES = ("enable_resource_pool", "n_gpus_per_node", "nnodes")
_LOSSES_OF_EXPERTS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
_ONLY_MINDSPEEDS = ("strategy", "mcore_kwargs", "llm_kwargs", "fsdp_kwargs", "mm_kwargs", "_target_")
# Sections that hold a role's ulysses_sequence_parallel_size besides the role itself, whose own counts where it is above 1.
_ULYSSES = ((ACTOR, f"{ACTOR}.fsdp_config"), ("critic", "critic.model.fsdp_config"), ("critic", "critic.fsdp"))


def read_later_names(keys: Reader) -> dict[str, Any]:
    """Let all rules that follow read a setting by its earlier name. Both names with different values are a problem, unless one
    is a default that a file repeats, as verl's own do.

    Returns: the fields of settings that need no rule.
    """
    fields: dict[str, Any] = {}
    for row in keys.ledger.rows:
        if not row.same_as or (value := get(keys, row.name)) is None:
            continue
        default = keys.ledger.by_name[row.same_as].default if row.same_as in keys.ledger.by_name else ABSENT
        repeated = [name for name in (row.name, row.same_as) if keys.in_file(name) and same(keys[name], default)]
        if keys.written(row.same_as) and keys[row.same_as] != value and row.same_as not in repeated:
            if row.name in repeated or (row.name.startswith(_MIGRATED) and keys.in_file(row.name)):
                continue
            what = f"{row.name} is the later name of {row.same_as}, and they are {value} and {keys[row.same_as]}"
            keys.problem(what, key=row.name, fix="keep one of them")
        elif (earlier := keys.ledger.find(row.same_as)) is not None:
            keys.put(row.same_as, value)
            if not earlier.by_rule:
                fields |= dict.fromkeys(earlier.fields, earlier.to(value) if earlier.to else value)
    percent = f"{ACTOR}.k_percent"
    if (share := get(keys, percent)) is not None:
        keys.put(f"{ACTOR}.policy_loss.kl_cov_ratio", share / 100)
        if get(keys, f"{ACTOR}.policy_loss.loss_mode") != "kl_cov":
            keys.ignore(percent, "the loss kl_cov reads it")
    _read_model_engine(keys)
    _read_one_teacher(keys)
    for role, section in _ULYSSES:
        own, later = (f"{place}.ulysses_sequence_parallel_size" for place in (role, section))
        if get(keys, own, 1) == 1 and get(keys, later, 1) > 1:
            keys.put(own, keys[later])
    return fields


def _read_one_teacher(keys: Reader) -> None:
    """Let the teacher of verl between 0.7 and 0.8 (``distillation.teacher_model``) be the one of ``teacher_models``."""
    one = keys.section(_ONE_TEACHER)
    if not one:
        return
    own = {key: value for key, value in one.items() if key not in _ITS_DEVICES}
    keys.put(f"distillation.teacher_models.{_ONE_TEACHER.rpartition('.')[2]}", own)
    if one.get("enable_resource_pool"):
        for name in _ITS_DEVICES[1:]:
            keys.put(f"distillation.{name}", one.get(name))
    else:
        why = "enable_resource_pool is false: teachers work on the policy's devices"
        for name in _ITS_DEVICES[1:]:
            keys.ignore(f"{_ONE_TEACHER}.{name}", why)


def _read_model_engine(keys: Reader) -> None:
    """Let the strategies that are not written be those of ``model_engine``, and MindSpeed's settings those of Megatron."""
    engine = get(keys, "model_engine", "dp")
    if engine != "dp":
        for section in (ACTOR, "critic"):
            if not keys.written(f"{section}.strategy"):
                keys.put(f"{section}.strategy", engine)
    for section in (ACTOR, "critic"):
        if keys[f"{section}.strategy"] == MINDSPEED:
            keys.put(f"{section}.strategy", MEGATRON)
    for section in (ACTOR, REF, "critic"):
        for name, value in keys.section(f"{section}.{MINDSPEED}").items():
            if name not in _ONLY_MINDSPEEDS:
                keys.put(f"{section}.{MEGATRON}.{name}", value)
        for arguments in ("mcore_kwargs", "llm_kwargs"):
            for name in _LOSSES_OF_EXPERTS:
                if (value := get(keys, f"{section}.{MINDSPEED}.{arguments}.{name}")) is not None:
                    keys.put(f"{section}.{MEGATRON}.override_transformer_config.{name}", value)
