"""A composed file of a peer, as its rules read it: values, places, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.config.reading.compose import Composed
from posttrain.config.reading.defaults import Options
from posttrain.dialects.ledger import ABSENT, Ledger
from posttrain.dialects.loaded import Ignored
from posttrain.dialects.own_keys import (
    Own,
    own_keys_of,
)
from posttrain.dialects.trees import NOTHING, parents, value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import Problem

SHIPPED_IN = "verl/trainer/config"  # the folder of the base files in a checkout of verl
HYDRA_CLASS = "_target_"  # the class that Hydra makes of a section
# Sets the fields that several keys decide together; complains through the Reader.
Rules = Callable[["Reader"], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A peer's configuration language."""

    name: str
    ledger: Ledger
    rules: Mapping[str, Rules]  # by the name of the entry; an entry without rules cannot be read in this dialect
    unknown_keys: Literal["refuse", "warn"] = "refuse"
    # Files that a defaults list may name.
    built_in: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    # Of these files: by group, such as engine, the options and what each holds otherwise
    options: Mapping[str, Options] = field(default_factory=dict)
    refers_to_defaults: bool = True  # True: ${...} may refer to a key that is not written
    # Gives sections that have several names the name of their rows
    renamed: Callable[[Composed], Composed] = lambda composed: composed


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class Reader:
    """The written values, key by key, for the rules of a dialect; collects what the rules report."""

    def __init__(
        self, ledger: Ledger, composed: Composed, *, skip_files: bool = False, here: bool = False, drops: bool = False
    ):
        self.ledger = ledger
        self.skip_files, self.here = skip_files, here  # files need not exist; one device is taken in the end
        self.drops = drops  # words of the user's own are left out
        self.values = composed.values
        self.sources = composed.sources
        self.problems: list[Problem] = list(composed.problems)
        self.unsupported: list[Problem] = []
        self.ignored: list[Ignored] = []
        self.warnings = [
            f"the environment variable {name} is not set here; the run needs it" for name in composed.unset
        ]
        # What was meant by rejected values: rules read it, so that nothing is reported for the default's sake
        self.stand_ins: dict[str, Any] = {}
        self.slips: list[Problem] = []  # unknown keys that look like known ones, where they are no errors
        self.origins: dict[str, str] = {}
        self.bad: set[str] = set()  # keys with a problem of their own: their default stands in
        self.left_out: set[str] = set()  # keys with an option of the user's own, whose default stands in by their word
        self.referred = composed.referred
        self.open = frozenset(composed.open)  # written as ???: their defaults stand in
        self.own: list[Own] = []  # keys that the peer does not have
        self.own_keys, problems = own_keys_of(self.section(OUR_SECTION), self.sources)
        self.problems += problems
        self._named = {key for place in self.sources.places for key in (place, *parents(place))}
        self._whole = tuple(f"{key}." for key, place in self.sources.places.items() if place.whole)

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, written or default; None for an unwritten key without default."""
        if key not in self.bad and not self.written(key) and (other := self._refers_to(key)) in self.bad:
            return self[other]  # the file's reference holds the value that was rejected there
        if key in self.stand_ins:
            return self.stand_ins[key]
        value = None if key in self.bad else value_at(self.values, key)
        if value is NOTHING or key in self.bad:
            row = self.ledger.find(key)
            if row is None:
                raise KeyError(f"{key} has no row in the {self.ledger.dialect} ledger")
            value = None if row.default is ABSENT else row.default
            if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
                return self[match[1]]
        return value

    def _refers_to(self, key: str) -> str:
        """Return the key whose value is this one's default; "" without."""
        row = self.ledger.find(key)
        match = _REFERENCE.fullmatch(row.default) if row is not None and isinstance(row.default, str) else None
        return match[1] if match else ""

    def section(self, key: str) -> dict[str, Any]:
        """The values below a key; empty when there are none."""
        value = value_at(self.values, key)
        return value if isinstance(value, dict) else {}

    def put(self, key: str, value: Any) -> None:
        """Let the rules that follow read a key as another value: as the number that other keys make of it."""
        tree = self.values = dict(self.values)
        *above, name = key.split(".")
        for part in above:
            tree[part] = dict(tree.get(part) or {})
            tree = tree[part]
        tree[name] = value

    def remove(self, key: str) -> None:
        """Let the rules that follow read a key as one that is not written."""
        *above, name = key.split(".")
        tree = self.values = dict(self.values)
        for part in above:
            tree[part] = dict(tree[part])
            tree = tree[part]
        del tree[name]

    def take_over(self, section: str) -> None:
        """Withdraw the reports of keys below a section that a rule hands to the user's own code after all."""
        self.ignored[:] = [one for one in self.ignored if not one.key.startswith(f"{section}.")]
        self.unsupported[:] = [one for one in self.unsupported if not one.field.startswith(f"{section}.")]

    def written(self, key: str) -> bool:
        """True when the user wrote the key, or something below it; or a reference to a section with such a key."""
        return self.named(key) or (key.startswith(self._whole) and value_at(self.values, key) is not NOTHING)

    def named(self, key: str) -> bool:
        """True when the user wrote the key, or something below it, by its name."""
        return key in self._named

    def in_file(self, key: str) -> bool:
        """Return True when the key is written in a user's file, and no override replaces it."""
        place = self.sources.places.get(key)
        return place is not None and not place.text.startswith("override ")

    def of_checkout(self, key: str) -> bool:
        """Return True when the key is written in the base file of a checkout of verl, or of a package that builds on verl, and no
        override replaces it."""
        return self.in_file(key) and f"{SHIPPED_IN.removeprefix('verl')}/" in self.sources.places[key].text

    def order(self, key: str) -> int:
        """Sorts keys as they were written."""
        places = list(self.sources.places)
        return places.index(key) if key in places else len(places)

    def problem(self, what: str, *, key: str, fix: str = "", refused: bool = False) -> None:
        """The configuration is wrong, or asks for what is ``refused``. A key of the wrong type is reported once: what else is
        wrong with it is wrong with the default in its place."""
        if not any(problem.field == key and (problem.what == what or key in self.bad) for problem in self.problems):
            where = self.sources.where(key)
            self.problems.append(Problem(what, fix=fix, where=where, field=key, refused=refused))

    def empty(self, key: str) -> None:
        """Reject an empty text where something must stand; mostly a shell variable that is not set."""
        self.problem(f"{key} is empty", key=key, fix="was a variable of the script not set?")
        self.bad.add(key)

    def plan_only(self, what: str, *, key: str, fix: str = "") -> None:
        """Right to ask for and planned: it can be planned for, and a run is refused."""
        self.unsupported.append(Problem(what, fix=fix, where=self.sources.where(key), field=key))

    def ignore(self, key: str, reason: str) -> None:
        """A key that has no effect in this configuration. Told only when it was written."""
        if self.written(key):
            row = self.ledger.find(key)
            asks = row is None or not any(same(value_at(self.values, key), one) for one in row.asks_nothing)
            # A section written as a reference is requested there, and what a fork's base file holds is no request
            asks = asks and self.named(key) and not self.of_checkout(key)
            self.ignored.append(Ignored(key=key, reason=reason, where=self.sources.where(key), asks=asks))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def same(value: Any, other: Any) -> bool:
    if isinstance(other, str) and other.startswith("${"):
        return False
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
