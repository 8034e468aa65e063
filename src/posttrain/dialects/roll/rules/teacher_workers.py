"""Workers of teachers: one, or several by name, whose settings have the types of the other workers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.dialects.ledger import leaves
from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.devices import EXAMPLE, devices_of
from posttrain.dialects.value_types import fits, parse_type, type_text
from posttrain.errors import did_you_mean

SECTION = "teacher"
PATH, DEVICES, COEF, TAGS = "model_args.model_name_or_path", "device_mapping", "opd_kl_coef", "tag_included"

_COMPUTED = "the teacher is computed in the policy's engine"


def teacher_sections(keys: Reader) -> dict[str, tuple[str, Any]]:
    """The workers by name, each with the key of its section."""
    section = keys.section(SECTION)
    if section and "model_args" in section:
        return {SECTION: (SECTION, section)}
    return {str(name): (f"{SECTION}.{name}", worker) for name, worker in section.items()}


def teacher_values(keys: Reader, at: str, worker: Any, *, like: str, read: Sequence[str]) -> dict[str, Any]:
    """Return the settings that are ``read``, by dotted name; those of a wrong type are reported and left out, others are ignored.

    Args: at, the key of the worker's section; like, a section whose keys have the types of a worker's.
    """
    found: dict[str, Any] = {}
    for name, value in leaves(worker) if isinstance(worker, Mapping) else ():
        row, key = keys.ledger.find(f"{like}.{name}"), f"{at}.{name}"
        if name not in read:
            known = row is not None or name.startswith("strategy_args.")
            guess = did_you_mean(name, read, listed=True)
            keys.ignore(key, _COMPUTED if known else f"an unknown key{guess and f'; {guess}'}")
            continue
        type_ = parse_type("list of text") if row is None else row.type
        if fits(value, type_):
            found[name] = value
        else:
            keys.problem(f"{key} must be {type_text(type_)}, not {value!r}", key=key)
            keys.bad.add(key)
    return found


def teacher_devices(keys: Reader) -> dict[str, list[int]]:
    """Return the device ids of teachers that name some."""
    found: dict[str, list[int]] = {}
    for name, (at, worker) in teacher_sections(keys).items():
        value = worker.get(DEVICES) if isinstance(worker, Mapping) else None
        # A value of another type is reported with the other settings.
        if value is None or not fits(value, parse_type("text | list of int")):
            continue
        try:
            found[name] = devices_of(value)
        except ValueError as error:
            keys.problem(f"{at}.{DEVICES}={error}", key=f"{at}.{DEVICES}", fix=EXAMPLE)
    return found
