"""Settings that have another name, or another section, in later versions of verl."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR

# Sections that hold a role's ulysses_sequence_parallel_size besides the role itself, whose own counts where it is above 1.
_ULYSSES = ((ACTOR, f"{ACTOR}.fsdp_config"), ("critic", "critic.model.fsdp_config"), ("critic", "critic.fsdp"))


def read_later_names(keys: Reader) -> dict[str, Any]:
    """Let all rules that follow read a setting by its earlier name. Both names with different values are a problem.

    Returns: the fields of settings that need no rule.
    """
    fields: dict[str, Any] = {}
    for row in keys.ledger.rows:
        if not row.same_as or (value := get(keys, row.name)) is None:
            continue
        if keys.written(row.same_as) and keys[row.same_as] != value:
            what = f"{row.name} is the later name of {row.same_as}, and they are {value} and {keys[row.same_as]}"
            keys.problem(what, key=row.name, fix="keep one of them")
        elif (earlier := keys.ledger.find(row.same_as)) is not None:
            keys.put(row.same_as, value)
            if not earlier.by_rule:
                fields |= dict.fromkeys(earlier.fields, earlier.to(value) if earlier.to else value)
    _read_model_engine(keys)
    for role, section in _ULYSSES:
        own, later = (f"{place}.ulysses_sequence_parallel_size" for place in (role, section))
        if get(keys, own, 1) == 1 and get(keys, later, 1) > 1:
            keys.put(own, keys[later])
    return fields


def _read_model_engine(keys: Reader) -> None:
    """Let the strategies that are not written be those of ``model_engine``."""
    engine = get(keys, "model_engine", "dp")
    if engine != "dp":
        for section in (ACTOR, "critic"):
            if not keys.written(f"{section}.strategy"):
                keys.put(f"{section}.strategy", engine)
