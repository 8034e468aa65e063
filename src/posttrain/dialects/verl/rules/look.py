"""Access to verl's keys, for the rules."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import LATER
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.strategies import MEGATRON
from posttrain.plan.engine import engine_plan
from posttrain.plan.engines.megatron.experts import BALANCE, KIND

_OVERRIDES = "override_transformer_config"
# Our size of a group -> Megatron's name
MEGATRONS_SIZES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "sequence_parallel": "context_parallel_size",
}


def get(keys: Reader, name: str, otherwise: Any = None) -> Any:
    """The value of a key; ``otherwise`` where this version does not have the key, or it is null."""
    value = keys[name] if keys.ledger.find(name) else None
    return otherwise if value is None else value


def names_a_later_key(keys: Reader) -> bool:
    """Return True when the user wrote a key that came after the documented versions of verl, which shows a later one."""
    rows = (keys.ledger.find(key) for key in keys.sources.places)
    return any(row is not None and row.since == LATER for row in rows)


def kind_of_device(keys: Reader) -> str:
    """Our word for trainer.device; npu becomes the accelerator available, with a warning."""
    kind: str = keys["trainer.device"]
    if kind == "npu":
        keys.warn("trainer.device=npu: Ascend devices are not supported, and the run takes the accelerator available")
        return "auto"
    return kind


def all_are_counts(*values: int) -> bool:
    """Return True when all values are counts; numbers below 1 are reported by RunConfig."""
    return all(value >= 1 for value in values)


def engine_options(keys: Reader, section: str, options: str) -> dict[str, Any]:
    """The sharding settings of a role, by their names in engine_options."""
    rows = [row for row in keys.ledger.rows if row.name.startswith(f"{section}.") and row.status == "mapped"]
    wanted = [(row, field) for row in rows for field in row.fields if field.startswith(f"{options}.")]
    found = ((field, keys[row.name], row.to) for row, field in wanted)
    return {field: to(value) if to else value for field, value, to in found if value is not None}


def megatron_options(keys: Reader, section: str) -> dict[str, Any]:
    """Megatron's settings of a role without its sizes, and without those that rules or other rows read."""
    apart = {*MEGATRONS_SIZES.values(), "router_replay", "qat", "_target_"}
    given = keys.section(f"{section}.megatron").items()
    found = {name: value for name, value in given if name not in apart and value is not None}
    place = f"{section}.megatron"
    return balanced_as_in_verl(keys, place, without_new_ones(keys, place, found, MEGATRON))


def without_new_ones(keys: Reader, section: str, options: dict[str, Any], engine: str) -> dict[str, Any]:
    """Leave out what the engine does not know and a checkout's own file alone asks for: verl's files get further settings, and
    their values there ask for nothing."""
    kind = engine_plan(engine).options
    if kind is None:
        return options
    kept = {}
    for name, value in options.items():
        if name in kind.model_fields or not keys.of_checkout(f"{section}.{name}"):
            kept[name] = value
        else:
            keys.ignore(f"{section}.{name}", f"verl's own file has it, and the engine {engine} has no such setting")
    return kept


def balanced_as_in_verl(keys: Reader, section: str, options: dict[str, Any]) -> dict[str, Any]:
    """Leave the weight of Megatron's balance loss out of the options, unless they name its kind: verl's own is none."""
    inside = options.get(_OVERRIDES)
    weight = inside.get(BALANCE) if isinstance(inside, dict) else None
    if not isinstance(inside, dict) or not weight or isinstance(weight, str) or inside.get(KIND) is not None:
        return options  # a text is no weight, which the engine's own check reports
    kind = f"+{section}.{_OVERRIDES}.{KIND}=aux_loss"
    why = f"verl's models have {KIND}=none, and so no loss that balances experts; {kind} gives them one"
    keys.ignore(f"{section}.{_OVERRIDES}.{BALANCE}", why)
    return options | {_OVERRIDES: {name: value for name, value in inside.items() if name != BALANCE}}


def divisors_around(number: int, near: int) -> tuple[int, int]:
    """The largest divisor of ``number`` that is at most ``near``, and the smallest that is at least it (near <= number)."""
    below = next(candidate for candidate in range(near, 0, -1) if number % candidate == 0)
    above = next(candidate for candidate in range(near, number + 1) if number % candidate == 0)
    return below, above
