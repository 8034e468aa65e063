"""Access to SkyRL's keys by either name, also in versions that lack them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.ledger import LEDGER

# Name of mid-2025 -> its later name.
LATER_NAMES = {row.same_as: row.name for row in LEDGER.rows if row.same_as}


def name_of(keys: Reader, name: str) -> str:
    """The name under which a setting was written: its later one, or that of mid-2025."""
    later = LATER_NAMES.get(name)
    return later if later and later in keys.ledger.by_name and keys.written(later) else name


def get(keys: Reader, name: str) -> Any:
    """The value of a setting under whichever name it was written; in a version without it, the default it has later."""
    written = name_of(keys, name)
    if written != name and keys[written] is not None:
        return keys[written]
    if name not in keys.ledger.by_name:
        default = LEDGER.by_name[name].default
        return None if default is ABSENT else default
    return keys[name]


def is_of_2026(keys: Reader) -> bool:
    """Tell whether the configuration has the section that came in 2026."""
    return keys.written("generator.inference_engine")


def two_names(keys: Reader) -> dict[str, Any]:
    """The fields of settings that were written under their later names and need no rule. Refuses both names at once."""
    fields: dict[str, Any] = {}
    for name, later in LATER_NAMES.items():
        if "*" in name or name_of(keys, name) != later:
            continue
        if keys.written(name):
            what = f"{later} is the later name of {name}, and both are written"
            keys.problem(what, key=later, fix="keep one of them")
        row = LEDGER.by_name[name]
        if row.status == "mapped" and not row.by_rule and (value := keys[later]) is not None:
            fields |= dict.fromkeys(row.fields, row.to(value) if row.to else value)
    return fields


def ignore_all(keys: Reader, sections: Iterable[str], reason: str) -> None:
    """Tell what was written below ``sections`` and does something in other runs."""
    for row in keys.ledger.rows:
        below = any(row.name == section or row.name.startswith(f"{section}.") for section in sections)
        if below and row.status == "mapped" and "*" not in row.name:
            keys.ignore(row.name, reason)


def joined(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid upon ``under``, section by section."""
    both = dict(under)
    for name, value in over.items():
        below = both.get(name)
        both[name] = joined(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both
