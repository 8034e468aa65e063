"""A file in somebody else's words becomes a LoadedConfig, by the rows of a ledger and the rules of its dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.config.reading.compose import Composed, compose
from posttrain.config.reading.defaults import read_with_defaults, split_choices
from posttrain.config.reading.hydra import UNUSED
from posttrain.config.reading.validate import show, validate
from posttrain.config.shown import secret_warnings
from posttrain.dialects.engine_fields import engine_without
from posttrain.dialects.entries import TRAIN, Entry
from posttrain.dialects.here import at_hand
from posttrain.dialects.known import Known
from posttrain.dialects.ledger import ABSENT, Key, Ledger, leaves
from posttrain.dialects.loaded import Ignored, LoadedConfig, expand_home
from posttrain.dialects.own_keys import (
    OWN_KEYS,
    Own,
    Settled,
    alone_in_its_group,
    is_named,
    own_keys_of,
    settle,
)
from posttrain.dialects.plugged import is_plugged, plug_in_named
from posttrain.dialects.trees import NOTHING, nested, parents, value_at
from posttrain.dialects.value_fixes import fix_of_value
from posttrain.dialects.value_types import fits, type_text
from posttrain.dialects.words import OUR_SECTION, Words
from posttrain.errors import GUESS, Problem

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
    refers_to_defaults: bool = True  # True: ${...} may refer to a key that is not written
    # Gives sections that have several names the name of their rows
    renamed: Callable[[Composed], Composed] = lambda composed: composed


class Reader:
    """The written values, key by key, for the rules of a dialect; collects what the rules report."""

    def __init__(self, ledger: Ledger, composed: Composed, *, skip_files: bool = False, here: bool = False):
        self.ledger = ledger
        self.skip_files, self.here = skip_files, here  # files need not exist; one device is taken in the end
        self.values = composed.values
        self.sources = composed.sources
        self.problems: list[Problem] = list(composed.problems)
        self.unsupported: list[Problem] = []
        self.ignored: list[Ignored] = []
        self.warnings = [
            f"the environment variable {name} is not set here; the run needs it" for name in composed.unset
        ]
        self.slips: list[Problem] = []  # unknown keys that look like known ones, where unknown keys are no error
        self.origins: dict[str, str] = {}
        self.bad: set[str] = set()  # keys with a problem of their own: their default stands in
        self.referred = composed.referred
        self.own: list[Own] = []  # keys that the peer does not have
        self.own_keys, problems = own_keys_of(self.section(OUR_SECTION), self.sources)
        self.problems += problems
        self._named = {key for place in self.sources.places for key in (place, *parents(place))}
        self._whole = [f"{key}." for key, place in self.sources.places.items() if place.whole]

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, written or default; None for an unwritten key without default."""
        value = None if key in self.bad else value_at(self.values, key)
        if value is NOTHING or key in self.bad:
            row = self.ledger.find(key)
            if row is None:
                raise KeyError(f"{key} has no row in the {self.ledger.dialect} ledger")
            value = None if row.default is ABSENT else row.default
            if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
                return self[match[1]]
        return value

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

    def take_over(self, section: str) -> None:
        """Withdraw the reports of keys below a section that a rule hands to the user's own code after all."""
        self.ignored[:] = [one for one in self.ignored if not one.key.startswith(f"{section}.")]
        self.unsupported[:] = [one for one in self.unsupported if not one.field.startswith(f"{section}.")]

    def written(self, key: str) -> bool:
        """True when the user wrote the key, or something below it; or a reference to a section with such a key."""
        return self.named(key) or (
            any(key.startswith(whole) for whole in self._whole) and value_at(self.values, key) is not NOTHING
        )

    def named(self, key: str) -> bool:
        """True when the user wrote the key, or something below it, by its name."""
        return key in self._named

    def in_file(self, key: str) -> bool:
        """Return True when the key is written in a user's file, and no override replaces it."""
        place = self.sources.places.get(key)
        return place is not None and not place.text.startswith("override ")

    def order(self, key: str) -> int:
        """Sorts keys as they were written."""
        places = list(self.sources.places)
        return places.index(key) if key in places else len(places)

    def problem(self, what: str, *, key: str, fix: str = "", refused: bool = False) -> None:
        """The configuration is wrong, or asks for what is ``refused``."""
        if not any(problem.field == key and problem.what == what for problem in self.problems):
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
            asks = row is None or not any(_same(value_at(self.values, key), one) for one in row.asks_nothing)
            asks = asks and self.named(key)  # a section written as a reference is requested there
            self.ignored.append(Ignored(key=key, reason=reason, where=self.sources.where(key), asks=asks))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def read_dialect(
    dialect: Dialect,
    path: str | None,
    overrides: Sequence[str],
    *,
    entry: Entry[Any] = TRAIN,
    version: str = "",
    here: bool = False,
    drop_unknown: bool = False,
    skip_files: bool = False,
) -> LoadedConfig[Any]:
    """The configuration of an entry, and everything there is to say about it.

    Args: ``version`` of the peer, "" for the ledger's own; ``here`` does without what only a cluster can give;
        ``drop_unknown`` without keys of the user's own; ``skip_files`` without a look into the files that it names.
    Raises: ConfigError when there is nothing to speak of: an unreadable file, broken YAML, a broken override.
    """
    ledger = (dialect.ledger.at(version) if version else dialect.ledger).of(entry.name)
    known = Known(ledger, dialect.ledger, frees=drop_unknown)
    choices, overrides = split_choices(path, overrides)
    composed = compose(
        path,
        overrides,
        struct=dialect.unknown_keys == "refuse",
        base=ledger.defaults() if dialect.refers_to_defaults else None,
        known=known,
        read=lambda file: read_with_defaults(file, dialect.built_in, choices),
        leave_out_missing=True,
        name_unset=skip_files,
    )
    composed = dialect.renamed(composed)
    plug_in_named(ledger, composed.values)
    reader = Reader(ledger, composed, skip_files=skip_files, here=here)
    _look_at_every_key(dialect, reader, known, here=here)
    settled = _settle_own_keys(reader, known, drop=drop_unknown)
    reader.ignored += [
        Ignored(key=key, reason=UNUSED, where=where, asks=False) for key, where in composed.hydra.items()
    ]
    for key in composed.open:
        reader.warn(f"{key} is left open (???) and takes {show(reader[key])}, the default of {dialect.name}")
    for key in composed.missing:
        row = ledger.find(key)
        if row is None or row.status == "mapped":
            reader.problem(f"{key} must be given: ??? stands in its place", key=key)
    fields = _direct(reader) | dialect.rules[entry.name](reader)
    words = Words(ledger, reader, entry.root)
    fields = _only_what_engines_read(fields, reader, words, here=here) | _our_fields(reader)
    config, found = validate(nested(fields), words.sources, entry.root)
    config = expand_home(config)
    changes: list[str] = []
    if here:
        config, changes = at_hand(config)
    config = config.with_references(
        tuple(("", value, text) for _, value, text in composed.references if len(value) > 3)
    )
    found = _new(found, reader, words)
    problems = [*reader.problems, *words.translate(found)]
    if problems:  # they may only follow from a misspelt key, whose default stands in
        problems += reader.slips
    reader.ignored.sort(key=lambda one: reader.order(one.key))
    problems.sort(key=lambda problem: reader.order(problem.field))
    warnings = list(reader.warnings)
    if all(problem.refused for problem in problems):
        warnings += [words.text(text) for text in entry.warnings_of(config) if words.is_written(text)]
        warnings += [words.text(text) for text in secret_warnings(config)]
        problems += words.translate([*entry.check(config), *alone_in_its_group(settled, config)])
        reader.unsupported += [
            replace(problem, fix="--here runs without it") for problem in words.translate(entry.unsupported(config))
        ]
    label = f"{dialect.name}@{version}" if version else dialect.name
    return LoadedConfig(
        config=config,
        sources=words.sources,
        dialect=label,
        entry=entry.name,
        warnings=tuple(warnings),
        problems=tuple(problems),
        ignored=tuple(reader.ignored),
        unsupported=tuple(reader.unsupported),
        changes=tuple(words.text(change) for change in changes),
        words=words,
    )


def _look_at_every_key(dialect: Dialect, reader: Reader, known: Known, *, here: bool) -> None:
    """Every key that was written is known, has the right type, and is mapped, or reported as ignored, planned or refused."""
    ledger = reader.ledger
    for key, value in leaves(reader.values):
        if key.split(".")[0] == OUR_SECTION:  # looked at with the other fields
            continue
        row = ledger.by_name.get(key) if key.rpartition(".")[2] == HYDRA_CLASS else ledger.find(key)
        if row is None and key.rpartition(".")[2] == HYDRA_CLASS:
            why = "it names a class of the peer's own program"
            reader.ignored.append(Ignored(key=key, reason=why, where=reader.sources.where(key), asks=False))
            continue
        if row is None and (ledger.is_section(key) and isinstance(value, dict | None)):
            continue
        inside = row is None  # a section whose names the user chooses; so are the types of what stands there
        if row is None:
            row = known.holds_anything_above(key)
            if row is None:
                _unknown(dialect, reader, known, key)
                continue
        if not reader.written(key):
            continue
        if known.is_free(row) and (known.frees or is_named(key, reader.own_keys)):
            _unknown(dialect, reader, known, key)
            continue
        if not inside and not _right_type(reader, key, value, row):
            continue
        _by_status(reader, key, value, row, here=here)


def _unknown(dialect: Dialect, reader: Reader, known: Known, key: str) -> None:
    where = reader.sources.where(key)
    if not reader.named(key):  # it came with the section that another one refers to, which has its own look at it
        why = "the section that is referred to has it, and nothing reads it here"
        reader.ignored.append(Ignored(key=key, reason=why, where=where, asks=False))
        return
    if any(f"{key}.".startswith(f"{other}.") for other in reader.referred):
        reader.ignored.append(Ignored(key=key, reason="a helper: other keys refer to it", where=where, asks=False))
        return
    own = Own(key=key, value=value_at(reader.values, key), where=where)
    if dialect.unknown_keys == "refuse" or is_named(key, reader.own_keys):
        reader.own.append(own)
        return
    what, fix = known.absent(key, "")
    reader.warn(
        f"{what}, at {where}; {dialect.name} ignores such keys, and so does this run{f' ({fix})' if fix else ''}"
    )
    reader.ignored.append(Ignored(key=key, reason="an unknown key", where=where))
    if fix.startswith(GUESS):
        reader.slips.append(Problem(f"{what}, and {dialect.name} ignores it", fix=fix, where=where, field=key))


def _settle_own_keys(reader: Reader, known: Known, *, drop: bool) -> Settled:
    """Handle all keys of the user's own together."""
    own = sorted(reader.own, key=lambda one: reader.order(one.key))
    settled = settle(own, known, reader.own_keys, drop=drop)
    reader.ignored += settled.ignored
    reader.problems += settled.problems
    reader.unsupported += settled.unsupported
    for key in reader.own_keys:
        row = reader.ledger.find(key)
        if row is not None and not known.is_free(row):
            reader.problem(
                f"{OWN_KEYS} names {key}, which is {reader.ledger.dialect}'s and is read",
                key=OWN_KEYS,
                fix="take it out of the list",
            )
    return settled


def _right_type(reader: Reader, key: str, value: Any, row: Key) -> bool:
    if row.name.endswith("**") or fits(value, row.type) or is_plugged(row, value):
        return True
    if value == "":
        reader.empty(key)
        return False
    reader.problem(f"{key} must be {type_text(row.type)}, not {show(value)}", key=key, fix=fix_of_value(value, row))
    reader.bad.add(key)
    return False


def _by_status(reader: Reader, key: str, value: Any, row: Key, *, here: bool) -> None:
    if row.status == "ignored":
        asks = reader.named(key) and not any(_same(value, one) for one in row.asks_nothing)
        reader.ignored.append(Ignored(key=key, reason=row.reason, where=reader.sources.where(key), asks=asks))
    elif row.status in ("refused", "planned") and not any(_same(value, one) for one in row.asks_nothing):
        if row.status == "refused":
            reader.problem(f"{key} is refused: {row.reason}", key=key, refused=True)
        elif row.cluster and here:
            reader.ignored.append(
                Ignored(key=key, reason=f"--here does without: {row.reason}", where=reader.sources.where(key))
            )
        else:
            reader.plan_only(f"{key} is planned: {row.reason}", key=key, fix="remove it to run without")


def _same(value: Any, other: Any) -> bool:
    if isinstance(other, str) and other.startswith("${"):
        return False
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _direct(reader: Reader) -> dict[str, Any]:
    """The fields of all mapped rows that need no rule. A key that is null leaves our default."""
    fields: dict[str, Any] = {}
    for row in reader.ledger.rows:
        if row.status != "mapped" or row.by_rule or "*" in row.name:
            continue
        value = reader[row.name]
        if value is None and row.to is None and (row.default is ABSENT or not reader.written(row.name)):
            continue
        ours = row.to(value) if row.to else value
        fields |= dict.fromkeys(row.fields, ours)
    return fields


def _our_fields(reader: Reader) -> dict[str, Any]:
    """The fields that are written by our own names."""
    fields = dict(leaves(reader.section(OUR_SECTION)))
    return {name: value for name, value in fields.items() if f"{OUR_SECTION}.{name}" != OWN_KEYS}


def _only_what_engines_read(fields: dict[str, Any], reader: Reader, words: Words, *, here: bool) -> dict[str, Any]:
    """Drop engine options that the chosen engine does not have; written ones are reported. With ``here`` the plain engines
    will be chosen."""
    kept = {}
    for name, value in fields.items():
        ignored_by = engine_without(name, fields, here=here)
        if ignored_by is None:
            kept[name] = value
        elif key := words.key(name):
            reader.ignore(key, f"the {ignored_by} engine has no such setting")
    return kept


def _new(found: Iterable[Problem], reader: Reader, words: Words) -> list[Problem]:
    """Problems of the configuration that are not about a key that is reported already."""
    for key in {words.key(problem.field) for problem in found}:
        if key and reader.named(key) and value_at(reader.values, key) == "":
            reader.empty(key)
    reported = {problem.field for problem in reader.problems}
    return [problem for problem in found if words.key(problem.field) not in reported]
