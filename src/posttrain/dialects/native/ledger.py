"""The native dialect as a table, read off the models of every entry's root: every key goes where it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.config.base import Section
from posttrain.config.reading.keys import ITEM, NAME, known_keys, meaning, sections
from posttrain.dialects.entries import ENTRIES, Entry
from posttrain.dialects.ledger import ABSENT, Key, Ledger
from posttrain.plan.engine import engine_plans

OPTIONS_OF_TRAINING_ENGINES = ("policy.engine_options", "critic.engine_options", "reference.engine_options")


def native_ledger() -> Ledger:
    """One row per field of every entry's configuration, sections left out."""
    return Ledger(dialect="native", version="", rows=tuple(row for entry in ENTRIES.values() for row in _rows(entry)))


def _rows(entry: Entry[Any]) -> list[Key]:
    rows = []
    root: type[Section] = entry.root
    for name, field in _fields(root):
        shown = name.replace(ITEM, "*")
        rows.append(_row(shown, field, entry, meaning(name, root)))
        if shown in OPTIONS_OF_TRAINING_ENGINES:
            rows += _option_rows(shown, entry)
    return rows


def _option_rows(section: str, entry: Entry[Any]) -> list[Key]:
    """Make a row per option of the training engines; several may have an option of one name."""
    fields: dict[str, FieldInfo] = {}
    meanings: dict[str, list[str]] = {}
    for plan in engine_plans():
        options = plan.options
        if options is None:
            continue
        for name, field in _fields(options):
            fields.setdefault(name, field)
            meanings.setdefault(name, []).append(f"{plan.name}: {meaning(name, options)}")
    return [_row(f"{section}.{name}", field, entry, " ".join(meanings[name])) for name, field in fields.items()]


def _fields(root: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field by its dotted name, sections left out."""
    known = sections(root)
    for name, field in known_keys(root).items():
        if name not in known and f"{name}.{ITEM}" not in known and f"{name}.{NAME}" not in known:
            yield name, field


def _row(name: str, field: FieldInfo, entry: Entry[Any], meaning: str) -> Key:
    default: Any = field.default
    if field.default_factory is not None or default is PydanticUndefined:
        default = ABSENT
    elif isinstance(default, Section):
        default = default.model_dump(mode="json")
    elif get_origin(field.annotation) is tuple:
        default = list(default)
    return Key(
        name=name,
        type=field.annotation,
        default=default,
        status="mapped",
        fields=(name,),
        meaning=meaning,
        entry=entry.name,
    )
