"""Tables of keys, which stand as JSON beside each dialect, become a Ledger. CONTRIBUTING.md ("A config key") shows a row.

A table is a list. An item of it is a row (``key``), a heading (``about``), or a template that is filled in for one role
(``use``): the rows of ``templates/NAME.json``, with the item's own texts in the place of ``<section>``, ``<role>`` and the
like. Nothing is checked here but what reading needs; tests/unit/dialects/test_tables.py checks every row, by line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.dialects.converters import converter
from posttrain.dialects.ledger import ABSENT, Key, Ledger, Status
from posttrain.dialects.value_types import parse_type, type_text

# The column with the handling of a key: our fields where it is mapped, else a reason.
STATUSES: dict[str, Status] = {"field": "mapped", "ignored": "ignored", "refused": "refused", "planned": "planned"}
# Columns that belong to the status: a variant that brings another one leaves them behind.
HANDLING = frozenset({"rule", "convert", "change", "off", "cluster", "instead"})
EXAMPLES = frozenset({"example", "given", "expected", "because", "further", "only_value", "no_example"})
_OF_TEMPLATES = frozenset({"only", "for", "in"})
_GONE_WITHOUT_STATUS = HANDLING | EXAMPLES | STATUSES.keys()
IF_USED = "if used"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of a dialect: where they lie, their names in order, and the versions of the peer they know."""

    folder: Path
    dialect: str
    version: str
    names: tuple[str, ...]
    versions: tuple[str, ...] = ()

    def rows(self, table: str, *, examples: bool = False) -> Iterator[Row]:
        """The rows of a table, templates filled in; with the columns of ``EXAMPLES`` on request."""
        for item in _items(self.folder / f"{table}.json", examples):
            if "key" in item:
                yield item
            elif "use" in item:
                yield from fill_in(item, _items(self.folder / "templates" / f"{item['use']}.json", examples))

    def ledger(self) -> Ledger:
        """Read all rows as keys; their examples are for the tests."""
        keys: list[Key] = []
        known: dict[tuple[str, str], Key] = {}
        for table in self.names:
            for row in self.rows(table):
                new = _keys(row, known)
                keys += new
                known.update(((key.entry, key.name), key) for key in new)
        return Ledger(dialect=self.dialect, version=self.version, rows=tuple(keys), versions=self.versions)


@cache
def _items(file: Path, examples: bool) -> list[Row]:
    items: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return items if examples else [_without_examples(item) for item in items]


def _without_examples(row: Row) -> Row:
    row = {name: value for name, value in row.items() if name not in EXAMPLES}
    if "in" in row:
        row["in"] = {roles: _without_examples(columns) for roles, columns in row["in"].items()}
    return row


def fill_in(use: Row, template: list[Row]) -> Iterator[Row]:
    """The rows of a template for one role.

    Args: ``use`` holds ``as``, the role's name in the columns ``only`` and ``in`` of the template; ``with``, columns that all
        rows get; ``except``, keys that the role has not; ``otherwise``, why a row without a handling of its own is
        ignored; ``ignored``, why every row is that does not name the role in ``in``; ``given``, for all examples; and texts.
    """
    role = use["as"]
    texts = {f"<{name}>": text for name, text in use.items() if isinstance(text, str)}
    left_out = set(use.get("except", ()))
    for row in template:
        if "key" not in row or role not in row.get("only", (role,)) or row["key"] in left_out:
            continue
        variant = next((columns for roles, columns in row.get("in", {}).items() if role in roles.split()), None)
        filled = row if role in row.get("for", (role,)) else _without_status(row)
        if variant is not None:
            filled = _varied(filled, variant)
        elif "ignored" in use:
            filled = _varied(filled, {"ignored": use["ignored"]})
        if STATUSES.keys().isdisjoint(filled) and "same_as" not in filled:
            filled = {**filled, "ignored": use["otherwise"]}
        if "example" in filled:
            filled = _in_context(filled, use.get("given", ()))
        columns = {**filled, **use.get("with", {})}
        yield {
            name: value if type(value) is str and "<" not in value else _replaced(value, texts)
            for name, value in columns.items()
            if name not in _OF_TEMPLATES
        }


def _in_context(row: Row, given: Iterable[str]) -> Row:
    """The row with a context before that of each of its examples."""
    further = [{**case, "given": [*given, *case.get("given", ())]} for case in row.get("further", ())]
    return {**row, "given": [*given, *row.get("given", ())], "further": further}


def _varied(row: Row, columns: Row) -> Row:
    """The row with other columns; a status brings its own handling and examples, an example its own context."""
    if not STATUSES.keys().isdisjoint(columns):
        row = _without_status(row)
    elif "example" in columns or "no_example" in columns:
        row = {name: value for name, value in row.items() if name not in EXAMPLES}
    return {**row, **columns}


def _without_status(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in _GONE_WITHOUT_STATUS}


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """The value with all placeholders in it, however deep, replaced."""
    if isinstance(value, str):
        if "<" in value:
            for placeholder, text in texts.items():
                value = value.replace(placeholder, text)
        return value
    if isinstance(value, dict):
        return {_replaced(name, texts): _replaced(one, texts) for name, one in value.items()}
    return [_replaced(one, texts) for one in value] if isinstance(value, list) else value


def _keys(row: Row, known: Mapping[tuple[str, str], Key]) -> list[Key]:
    """A row's keys: one per entry point."""
    entries = row.get("entry", "train").split()
    if "same_as" in row:
        return [_renamed(row, known[entry, row["same_as"]]) for entry in entries]
    return [key_of(row, entry) for entry in entries]


def key_of(row: Row, entry: str = "train") -> Key:
    """A row of a table as a Key."""
    column = next(column for column in STATUSES if column in row)
    get = row.get
    rule = get("rule", False)
    convert = get("convert")
    return Key(
        name=row["key"],
        type=parse_type(row["type"]),
        default=default_of(row["default"]) if "default" in row else ABSENT,
        status=STATUSES[column],
        meaning=row["meaning"],
        fields=tuple(row["field"].split()) if column == "field" else (),
        to=converter(convert) if convert else None,
        by_rule=bool(rule),
        if_used=rule == IF_USED,
        change=get("change", ""),
        reason="" if column == "field" else row[column],
        off=tuple(get("off", ())),
        cluster=get("cluster", False),
        instead=get("instead", ""),
        earlier={version: default_of(value) for version, value in get("earlier", {}).items()},
        since=get("since", ""),
        until=get("until", ""),
        released=get("released", False),
        free=get("free", False),
        note=get("note", ""),
        engine=get("engine", ""),
        entry=entry,
    )


def default_of(value: Any) -> Any:
    """A default of another version; ``{"absent": true}`` where that version's file does not hold the key."""
    return ABSENT if value == {"absent": True} else value


def _renamed(row: Row, key: Key) -> Key:
    """A later name of a key: like that one, but null until someone writes it."""
    open_ended = key.name.endswith("**")
    return replace(
        key,
        name=row["key"],
        type=key.type if open_ended else parse_type(f"{type_text(key.type)} | null"),
        default=key.default if open_ended else None,
        off=(*key.off, key.default) if key.status == "planned" else key.off,
        by_rule=key.status == "mapped",
        earlier=row.get("earlier", {}),
        since=row["since"],
        until="",
        note=f"The later name of {key.name}; writing both is an error.",
        same_as=key.name,
    )
