"""The native dialect as a table, read off the models of every entry's root: every key goes where it says."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic_core import PydanticUndefined

from posttrain.config.base import Section
from posttrain.config.reading.keys import ITEM, NAME, known_keys, sections
from posttrain.dialects.entries import ENTRIES, Entry
from posttrain.dialects.ledger import ABSENT, Key, Ledger


def native_ledger() -> Ledger:
    """One row per field of every entry's configuration, sections left out."""
    return Ledger(dialect="native", version="", rows=tuple(row for entry in ENTRIES.values() for row in _rows(entry)))


def _rows(entry: Entry[Any]) -> list[Key]:
    rows = []
    root: type[Section] = entry.root
    known = sections(root)
    for name, field in known_keys(root).items():
        if name in known or f"{name}.{ITEM}" in known or f"{name}.{NAME}" in known:
            continue
        default: Any = field.default
        if field.default_factory is not None or default is PydanticUndefined:
            default = ABSENT
        elif isinstance(default, Section):
            default = default.model_dump(mode="json")
        elif get_origin(field.annotation) is tuple:
            default = list(default)
        meaning = " ".join((field.description or "").split())
        shown = name.replace(ITEM, "*")
        rows.append(
            Key(
                name=shown,
                type=field.annotation,
                default=default,
                status="mapped",
                fields=(shown,),
                meaning=meaning,
                entry=entry.name,
            )
        )
    return rows
