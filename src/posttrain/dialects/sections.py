"""Sections that stand where a key takes a single value: ``lr: {value: 1e-6}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config.reading.fixes import missing_blank
from posttrain.config.reading.validate import show
from posttrain.dialects.ledger import Key, Ledger
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import value_at
from posttrain.dialects.value_types import fits, type_text
from posttrain.dialects.words import OUR_SECTION


def reject_sections(reader: Reader) -> None:
    """Report every key that holds a section and takes none, once; its default stands in, and what lies below is not looked at."""
    for key, row in list(_wrong(reader.ledger, reader.values, "")):
        if reader.written(key):
            fix = f"write the value itself, {key.rpartition('.')[2]}: ..."
            reader.problem(f"{key} must be {type_text(row.type)}, not a section", key=key, fix=fix)
        reader.bad.add(key)
        reader.remove(key)


def _wrong(ledger: Ledger, values: dict[Any, Any], above: str) -> Iterator[tuple[str, Key]]:
    for name, value in values.items():
        key = f"{above}.{name}" if above else str(name)
        if not isinstance(value, dict) or not value or key == OUR_SECTION:
            continue
        row = ledger.find(key)
        if row is None or row.name.endswith("**") or fits(value, row.type) or ledger.is_section(key):
            yield from _wrong(ledger, value, key)
        else:
            yield key, row


def reject_no_section(reader: Reader, key: str, value: Any) -> None:
    """Report a value in the place of a section of known keys; their defaults stand in."""
    below = next(row.name for row in reader.ledger.rows if row.name.startswith(f"{key}.") or _stands_for(row.name, key))
    leaf = below.split(".")[key.count(".") + 1].replace("*", "NAME")
    inside = {name.split(".")[key.count(".") + 1] for name in reader.ledger.by_name if name.startswith(f"{key}.")}
    fix = missing_blank(value, inside) or f"write its keys below it, such as {key}.{leaf}"
    reader.problem(f"{key} must be a section, not {show(value)}", key=key, fix=fix)
    reader.bad.add(key)
    reader.put(key, value_at(reader.ledger.defaults(), key) or {})


def _stands_for(name: str, key: str) -> bool:
    """Return True for a row below the key, some of whose sections are the user's own names."""
    parts, names = key.split("."), name.split(".")
    return len(names) > len(parts) and all(own in ("*", part) for own, part in zip(names, parts, strict=False))
