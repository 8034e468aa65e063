"""Messages about our fields, in the user's own keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from posttrain.config.base import Section
from posttrain.config.reading.keys import field_of
from posttrain.config.reading.sources import SourceMap
from posttrain.dialects.ledger import ABSENT, Key, Ledger
from posttrain.dialects.trees import NOTHING, value_at
from posttrain.errors import Problem
from posttrain.settings import is_number

# In every dialect: our fields by their own names, for what the dialect has no key for.
OUR_SECTION = "posttrain"
# The main program of a fork whose reward object scores; read by verl's rules alone
OWN_REWARDS = f"{OUR_SECTION}.own_rewards"


class WrittenKeys(Protocol):
    """The keys that a user wrote, and where."""

    ledger: Ledger
    sources: SourceMap
    values: Any  # the whole configuration, as a tree
    # Our fields whose names hold the user's own words, such as an environment's tag, by their keys
    origins: dict[str, str]

    def written(self, key: str) -> bool:
        """Tell whether the user wrote the key, or something below it."""
        ...

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key."""
        ...


class Words:
    """Translates messages about our fields into the user's own keys."""

    def __init__(self, ledger: Ledger, reader: WrittenKeys, root: type[Section]):
        self._ledger, self._reader, self._root = ledger, reader, root
        self._keys: dict[str, str] = {}
        rows: dict[str, Key] = {}  # by field
        self._plain: set[str] = set()  # fields whose value is their key's value, so that a fix can be given in it
        for row in ledger.rows:
            if row.status != "mapped":
                continue
            for name in row.fields:
                if name not in rows or self._rank(row, name) > self._rank(rows[name], name):
                    self._keys[name], rows[name] = row.name, row
                    self._plain.discard(name)
                    if not row.by_rule and row.to is None:
                        self._plain.add(name)
        # Possessive, so that a name with its key behind it is not matched in part
        name = rf"(?:{'|'.join(root.model_fields)})(?:\.[a-z_0-9]++)++"
        self._field = re.compile(rf"(?<![\w.])({name})\b(=[\w.+-]*\w)?+(?! \(by )")
        self.sources: SourceMap = _TheirSources(reader.sources.file, reader.sources.places, self)

    def _rank(self, row: Key, field: str) -> tuple[bool, bool, bool]:
        """Rank a row among those of a field: a written key comes before one with a default, and that before any other; of two
        written ones first that which holds a number's value."""
        counts = (row.entry, row.name) in self._ledger.numbers
        return self._reader.written(row.name), counts == _is_counted(field, self._root), row.default is not ABSENT

    def key(self, field: str) -> str:
        """Return the dialect's key of one of our fields, or of the nearest section around it; "" without one."""
        whole = field
        while field:
            if self._reader.written(f"{OUR_SECTION}.{field}"):
                return f"{OUR_SECTION}.{field}"
            if field in self._reader.origins:
                return self._reader.origins[field]
            if field in self._keys:
                return self._inside(self._keys[field], whole[len(field) :])
            field = field.rpartition(".")[0]
        return ""

    def counts(self, field: str) -> list[str]:
        """Return the written keys that count a field of ours in another way, each with its value and its conversion."""
        rows = [
            row for row in self._ledger.rows if field in row.fields and row.change and self._reader.written(row.name)
        ]
        return [f"{row.name}={self._reader[row.name]}: {row.change}" for row in rows]

    def _inside(self, key: str, rest: str) -> str:
        """Return the written key that an open-ended row (``options.**``) stands for; the row's own name without one."""
        section = key.removesuffix(".**")
        return f"{section}{rest}" if section != key and rest and self._reader.written(f"{section}{rest}") else key

    def value(self, key: str) -> Any:
        """Return the value of a key of the dialect, written or default; NOTHING without one."""
        found = value_at(self._reader.values, key)
        row = self._ledger.find(key)
        return self._reader[key] if found is NOTHING and row is not None and row.default is not ABSENT else found

    def where(self, field: str) -> str:
        key = self.key(field)
        return (
            self._reader.sources.where(key) if key else f"{field} (which {self._reader.ledger.dialect} has no key for)"
        )

    def text(self, text: str, *, in_fix: bool = False) -> str:
        """The same sentence with our field names replaced by their keys; ours follows in brackets where units differ. A setting
        that the dialect has no key for is written in our own section. Args: in_fix, of a field that a rule fills from another
        key, name the key that is to be changed."""

        def theirs(match: re.Match[str]) -> str:
            name, value = match[1], match[2] or ""
            key = self._keys.get(name, "")
            if key and name in self._plain:
                return f"{key}{value}"
            if key:
                return f"{name}{value} (by {key})"
            if in_fix and not value and name in self._reader.origins:
                return self._reader.origins[name]
            return f"+{OUR_SECTION}.{name}{value}" if value and not self.key(name) else f"{name}{value}"

        return self._field.sub(theirs, text)

    def is_written(self, text: str) -> bool:
        """Return True when a warning that begins with one of our fields is about a written key."""
        match = self._field.match(text)
        return match is None or (bool(self._keys.get(match[1])) and self._reader.written(self._keys[match[1]]))

    def translate(self, problems: Iterable[Problem]) -> list[Problem]:
        return [
            replace(
                problem,
                what=self.text(problem.what),
                fix=self.text(problem.fix, in_fix=True),
                where=problem.where or (self.where(problem.field) if problem.field else ""),
                field=self.key(problem.field) or problem.field,
            )
            for problem in problems
        ]


@cache
def _is_counted(field: str, root: type[Section]) -> bool:
    """Return True for a field that holds a number, or settings, among them numbers."""
    found = field_of(field, root)
    return found is None or is_number(found.annotation) or _is_section(found.annotation)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


@dataclass(frozen=True, slots=True)
class _TheirSources(SourceMap):
    """Places by our field names."""

    words: Words

    def where(self, key: str) -> str:
        return self.words.where(key)

    def where_missing(self, key: str) -> str:
        return self.words.where(key)
