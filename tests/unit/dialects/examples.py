"""The examples of the tables of keys: each row says what may be written, in which context, and what our fields are then."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.ledger import ABSENT, Key
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reader import Dialect
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.tables import Tables

PEERS = ("roll", "skyrl", "verl")
DOCUMENTS = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What is written beside a context, and the values of our fields then."""

    dialect: str
    entry: str
    key: str
    override: str
    given: tuple[str, ...]
    expected: dict[str, Any]  # by our field
    only_value: bool = False

    def __str__(self) -> str:
        return f"{self.dialect} {self.entry} {self.override} -> {' '.join(self.expected)}"[:100]


def tables_of(dialect: str) -> Tables:
    found: Tables = import_module(f"posttrain.dialects.{dialect}.ledger").TABLES
    return found


def dialect_of(name: str) -> Dialect:
    found: Dialect = import_module(f"posttrain.dialects.{name}").DIALECT
    return found


def examples(dialect: str) -> Iterator[Example]:
    """Every example of every row."""
    tables = tables_of(dialect)
    ledgers = {entry: dialect_of(dialect).ledger.of(entry) for entry in ENTRIES}
    for table in tables.names:
        for row in tables.rows(table, examples=True):
            for entry in row.get("entry", "train").split():
                key = ledgers[entry].by_name[row["key"]]
                for case in [row, *row.get("further", ())] if "example" in row else []:
                    yield Example(
                        dialect=dialect,
                        entry=entry,
                        key=key.name,
                        override=override(dialect, key, case["example"]),
                        given=tuple(case.get("given", ())),
                        expected=case["expected"],
                        only_value="only_value" in row,
                    )


def override(dialect: str, key: Key, text: str) -> str:
    """``text`` written for a key; as it stands where it names its key itself, as it must below a ``*``."""
    if re.match(r"[+~]*[\w.]+=", text):
        return text
    new = key.default is ABSENT and dialect_of(dialect).unknown_keys == "refuse"
    return f"{'+' if new else ''}{key.name}={text}"


@cache
def _contexts(dialect: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tables_of(dialect).folder.parent / "contexts.json").read_text(encoding="utf-8"))
    return found


def in_full(dialect: str, entry: str, given: Sequence[str]) -> list[str]:
    """The overrides of a context, the base first."""
    known = _contexts(dialect)
    base = given[0] if given and given[0] in known["bases"] else entry
    found = []
    for name in (*known["bases"][base], *given):
        if "=" in name or name.startswith("~"):
            found.append(name)
        elif name in known["contexts"]:
            context = known["contexts"][name]
            found += _joined(dialect, context if isinstance(context, list) else context[entry])
        elif name != base:
            found += known["bases"][name]
    return found


def _joined(dialect: str, context: Sequence[str]) -> list[str]:
    contexts = _contexts(dialect)["contexts"]
    return [one for name in context for one in (_joined(dialect, contexts[name]) if name in contexts else [name])]


@cache
def read(dialect: str, entry: str, given: tuple[str, ...], *written: str) -> LoadedConfig[Any]:
    """The configuration of a context, with what is written on top. A key of the base gives way to its later name."""
    peer = dialect_of(dialect)
    later = {row.same_as: row.name for row in peer.ledger.rows if row.same_as}
    names = {name_of(one) for one in (*given, *written)}
    overrides = [one for one in in_full(dialect, entry, given) if later.get(name_of(one)) not in names]
    overrides = [one.replace("DOCUMENTS", f"{DOCUMENTS}/{dialect}_documents") for one in (*overrides, *written)]
    return read_dialect(peer, None, overrides, entry=ENTRIES[entry])


def name_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def value(config: Any, field: str) -> Any:
    """The value at a dotted field, without what is left at its default in a list of sections."""
    node = config
    for part in field.split("."):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return plain(node)


def plain(value: Any) -> Any:
    """A value as JSON would hold it."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json", exclude_defaults=True)
        case list() | tuple():
            return [plain(one) for one in value]
    return value
