"""A dialect as a table: one row per key of theirs. The table is what is parsed with, explained, documented and tested."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from posttrain.config.reading.familiar import familiar_key
from posttrain.dialects.likeness import nearest_keys
from posttrain.dialects.value_types import type_text

Status = Literal["mapped", "ignored", "refused", "planned"]


class _Absent:
    """The default of a key that is not there until someone writes it."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


LATER = "later"  # a version after the documented ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a dialect.

    ``name`` is dotted. A part ``*`` stands for one name or list index that the user chooses; ``**`` at the end for
    everything below. ``default`` may refer to other keys: ``${actor_rollout_ref.rollout.n}``.
    """

    name: str
    type: Any  # see value_types
    default: Any
    status: Status
    meaning: str  # one line
    fields: tuple[str, ...] = ()  # mapped: the RunConfig fields it decides
    to: Callable[[Any], Any] | None = None  # mapped: their value -> ours; None: as it is
    by_rule: bool = False  # mapped: a rule sets the fields, because other keys have a say
    if_used: bool = False  # mapped by a rule: the value goes to the field as it is, in runs that use the role
    change: str = ""  # what happens to the value on the way, in words: "prompts x n = sequences"
    reason: str = ""  # why ignored or refused; what it waits for when planned
    off: tuple[Any, ...] = ()  # refused, planned: values besides the default that ask for nothing
    instead: str = ""  # mapped: the fix for a value that is not one of the type's choices, as a user's own code brings
    cluster: bool = False  # planned: asks for something of a cluster, which --here does without
    earlier: Mapping[str, Any] = field(default_factory=dict)  # version -> its default, where it is another
    since: str = ""  # the version that brought it; "" in all; "later": after the documented ones
    until: str = ""  # the last version that had it
    free: bool = False  # arguments that --drop-unknown leaves out, unless a rule hands them to the user's own code
    released: bool = False  # without default: some file that the peer ships holds it all the same
    note: str = ""  # where the peer's document and code disagree, and what is done here
    engine: str = ""  # mapped to an engine's options: the only engine that reads it
    same_as: str = ""  # the earlier name of the same setting
    entry: str = "train"

    @property
    def in_a_file(self) -> bool:
        """True when a file that the peer ships holds the key, so that an override needs no +."""
        return self.default is not ABSENT or self.since == LATER or self.released

    @property
    def asks_nothing(self) -> tuple[Any, ...]:
        """Values that leave a refused or planned key without consequence."""
        return (*self.off, None) if self.default is ABSENT else (*self.off, self.default)


@dataclass(frozen=True)
class Ledger:
    """The keys of a dialect in the version that is read."""

    dialect: str  # verl, skyrl, roll
    version: str  # of the peer; "" where the dialect has one
    rows: tuple[Key, ...]
    versions: tuple[str, ...] = ()  # oldest first
    # Keys of well-known forks -> the peer's own key of the same meaning
    words_of_forks: Mapping[str, str] = field(default_factory=dict)
    # Keys that a later file of the peer holds as null, because another section has them since: null is their default
    emptied: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [(row.entry, row.name) for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"{self.dialect}: two rows for {', '.join(name for _, name in twice)}")

    def at(self, version: str) -> Ledger:
        """The table as that version had it: its defaults, without the keys that came later. The same table every time."""
        if version not in self.versions:
            raise KeyError(version)
        if version in self._earlier:
            return self._earlier[version]
        place = self.versions.index(version)

        def there(row: Key) -> bool:
            came = 0 if not row.since else len(self.versions) if row.since == LATER else self.versions.index(row.since)
            return came <= place or place == len(self.versions) - 1

        def as_then(row: Key) -> Key:
            """The row with its default of the version, or else of the first version between it and the table's own that has
            one."""
            between = self.versions[place : self.versions.index(self.version)] if self.version in self.versions else ()
            found = next((each for each in (version, *between) if each in row.earlier), None)
            if found is None:
                return row
            off = row.off if row.default is ABSENT else (*row.off, row.default)
            return replace(row, default=row.earlier[found], off=off)

        rows = [as_then(row) for row in self.rows if there(row)]
        return self._earlier.setdefault(version, replace(self, version=version, rows=tuple(rows)))

    @cached_property
    def _earlier(self) -> dict[str, Ledger]:
        return {}

    def of(self, entry: str) -> Ledger:
        """The keys of one entry point: train, sft, evaluate, generate. The same table every time: what is found in it is kept."""
        if entry not in self._entries:
            self._entries[entry] = replace(self, rows=tuple(row for row in self.rows if row.entry == entry))
        return self._entries[entry]

    @cached_property
    def _entries(self) -> dict[str, Ledger]:
        return {}

    @cached_property
    def numbers(self) -> frozenset[tuple[str, str]]:
        """The rows that may hold a number, by entry point and name."""
        kinds = {"int", "float", "share"}
        return frozenset(
            (row.entry, row.name) for row in self.rows if not kinds.isdisjoint(type_text(row.type).split(" | "))
        )

    @cached_property
    def by_name(self) -> dict[str, Key]:
        return {row.name: row for row in self.rows}

    @cached_property
    def _patterns(self) -> list[tuple[str, Key]]:
        """The rows with a ``*`` in their names, each with what stands before it: few need to be compiled to find a key."""
        return [(row.name.partition("*")[0], row) for row in self.rows if "*" in row.name]

    @cached_property
    def sections(self) -> frozenset[str]:
        """Every key that has keys below it."""
        return frozenset(
            ".".join(parts[:end])
            for row in self.rows
            for parts in [row.name.split(".")]
            for end in range(1, len(parts))
        )

    def find(self, key: str) -> Key | None:
        """The row a written key belongs to."""
        row = self.by_name.get(key)
        if row is not None:
            return row
        if key not in self._found:
            fitting = (row for start, row in self._patterns if key.startswith(start) and _matches(row.name, key))
            self._found[key] = next(fitting, None)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[str, Key | None]:
        """The rows of keys that have been looked for and are in no row by their own names."""
        return {}

    def finds(self, key: str) -> list[Key]:
        """The rows of a key in every entry point, in the table's order."""
        return [row for row in self.rows if row.name == key or ("*" in row.name and _matches(row.name, key))]

    def is_section(self, key: str) -> bool:
        """True when known keys lie below this one."""
        if key in self.sections:
            return True
        parts = key.split(".")
        return any(
            len(section.split(".")) == len(parts)
            and all(one in ("*", other) for one, other in zip(section.split("."), parts, strict=True))
            for section in self.sections
            if "*" in section
        )

    def defaults(self) -> dict[str, Any]:
        """The nested tree of the defaults, references (``${...}``) untouched. Keys with ``*`` are not in it."""
        tree: dict[str, Any] = {}
        for row in self.rows:
            if row.default is ABSENT or "*" in row.name:
                continue
            node = tree
            *parents, leaf = row.name.split(".")
            for part in parents:
                below = node.setdefault(part, {})
                if not isinstance(below, dict):  # a section that is empty or null by default has keys of its own here
                    below = node[part] = {}
                node = below
            node.setdefault(leaf, row.default) if isinstance(node.get(leaf), dict) else node.update({leaf: row.default})
        return tree

    def nearest(self, key: str, limit: int = 1) -> list[str]:
        """Known keys most like one that is not known (``likeness.nearest_keys``). What the user chose for a ``*`` stands in its
        place."""
        parts = key.split(".")
        names = [_filled_in(name, parts) for name in self._names]
        return nearest_keys(key, names, limit) or self._meaning(familiar_key(parts[-1]))[:limit]

    def _meaning(self, field: str) -> list[str]:
        """The keys that set one of our fields; none for ""."""
        rows = [row for row in self.rows if field and row.status == "mapped" and "*" not in row.name]
        return sorted((row.name for row in rows if field in row.fields), key=lambda name: (name.count("."), len(name)))

    @cached_property
    def _names(self) -> list[str]:
        """Every key in the table's order, then the sections."""
        names = dict.fromkeys([*(row.name.removesuffix(".**") for row in self.rows), *sorted(self.sections)])
        return [name for name in names if not name.endswith(".*")]


def _filled_in(name: str, parts: Sequence[str]) -> str:
    """``rewards.*.worker_cls`` -> ``rewards.math.worker_cls`` for a key whose second part is math."""
    if "*" not in name:
        return name
    pattern = name.split(".")
    if len(pattern) != len(parts):
        return name
    return ".".join(part if own == "*" else own for own, part in zip(pattern, parts, strict=True))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\*\*", r".+").replace(r"\*", r"[^.]+")
    return re.compile(text)


def _matches(name: str, key: str) -> bool:
    """True for a key that a row's name with ``*`` (one part) or ``**`` (any number of them) stands for."""
    start, _, rest = name.partition("*")
    end = rest.rpartition("*")[2]
    if not key.startswith(start) or not key.endswith(end) or ("**" not in name and name.count(".") != key.count(".")):
        return False  # compiling a pattern takes longer
    return _pattern(name).fullmatch(key) is not None


def leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a nested dict that is no section; an empty section counts as a value."""
    if isinstance(values, dict) and (values or not key):
        for name, value in values.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, values
