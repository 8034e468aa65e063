"""A file in somebody else's words becomes a LoadedConfig, by the rows of a ledger and the rules of its dialect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from posttrain.config.reading.compose import Composed, compose
from posttrain.config.reading.defaults import read_with_defaults, split_choices
from posttrain.config.reading.groups import add_groups
from posttrain.config.reading.hydra import UNUSED
from posttrain.config.reading.keys import has_key
from posttrain.config.reading.validate import show, validate
from posttrain.config.shown import secret_warnings
from posttrain.dialects.engine_fields import engine_without, wrong_options
from posttrain.dialects.entries import TRAIN, Entry
from posttrain.dialects.here import at_hand
from posttrain.dialects.known import Known
from posttrain.dialects.ledger import ABSENT, Key, leaves
from posttrain.dialects.loaded import Ignored, LoadedConfig, expand_home
from posttrain.dialects.meant import at_their_holders, let_its_value_stand, let_slips_stand
from posttrain.dialects.own_keys import (
    OWN_KEYS,
    Own,
    Settled,
    alone_in_its_group,
    is_named,
    settle,
)
from posttrain.dialects.plugged import plug_in_named, read_by_own
from posttrain.dialects.reader import HYDRA_CLASS, Dialect, Reader, same
from posttrain.dialects.sections import reject_no_section, reject_sections
from posttrain.dialects.theirs import in_their_names, problems_in_their_names
from posttrain.dialects.trees import nested, parents, value_at
from posttrain.dialects.value_checks import right_option, right_type
from posttrain.dialects.value_types import fits, type_text
from posttrain.dialects.words import OUR_SECTION, OWN_REWARDS, Words
from posttrain.errors import GUESS, ConfigError, Problem


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
    choices, overrides = split_choices(path, overrides, dialect.options)
    composed = compose(
        path,
        overrides,
        struct=dialect.unknown_keys == "refuse",
        base=ledger.defaults() if dialect.refers_to_defaults else None,
        known=known,
        read=lambda file: read_with_defaults(file, dialect.built_in, choices, dialect.options),
        groups=add_groups,
        leave_out_missing=True,
        name_unset=skip_files,
    )
    composed = dialect.renamed(composed)
    plug_in_named(ledger, composed.values)

    def reader() -> Reader:
        return Reader(ledger, composed, skip_files=skip_files, here=here, drops=drop_unknown)

    label = f"{dialect.name}@{version}" if version else dialect.name
    try:
        loaded = _read(dialect, reader(), composed, known, entry, label)
        if loaded.problems and loaded.slips:
            # Problems may only follow from misspelt keys, whose defaults stand in
            again = _read(dialect, reader(), composed, known, entry, label, meant=True)
            loaded = loaded if {*loaded.problems} < {*again.problems} else again
    except ConfigError as error:
        raise ConfigError(problems_in_their_names(error.problems, composed.names)) from None
    return in_their_names(loaded, composed.names)


def _read(
    dialect: Dialect,
    reader: Reader,
    composed: Composed,
    known: Known,
    entry: Entry[Any],
    label: str,
    *,
    meant: bool = False,
) -> LoadedConfig[Any]:
    """Read a composed file; ``meant`` reads misspelt keys as those that were meant, and reports them as problems."""
    reject_sections(reader)
    _look_at_every_key(dialect, reader, known)
    settled = _settle_own_keys(reader, known)
    if meant:
        let_slips_stand(reader)
        reader.values = dialect.renamed(replace(composed, values=reader.values)).values
    reader.ignored += [
        Ignored(key=key, reason=UNUSED, where=where, asks=False) for key, where in composed.hydra.items()
    ]
    for key in composed.open:
        reader.warn(f"{key} is left open (???) and takes {show(reader[key])}, the default of {dialect.name}")
    for key in composed.missing:
        row = reader.ledger.find(key)
        if row is None or row.status == "mapped":
            reader.problem(f"{key} must be given: ??? stands in its place", key=key)
    fields = _fields(dialect, reader, entry.name)
    _reject_known_own_keys(reader, known)
    _leave_out_what_is_off(reader)
    words = Words(reader.ledger, reader, entry.root)
    fields = _only_what_engines_read(fields, reader, words) | _our_fields(reader)
    config, found = validate(nested(fields), words.sources, entry.root)
    config = expand_home(config)
    changes: list[str] = []
    if reader.here:
        config, changes = at_hand(config)
    config = config.with_references(
        tuple(("", value, text) for _, value, text in composed.references if len(value) > 3)
    )
    found = _new(found, reader, words)
    problems = [*reader.problems, *words.translate(found)]
    if meant:
        problems += reader.slips
    reader.ignored.sort(key=lambda one: reader.order(one.key))
    problems = at_their_holders(problems, reader, composed.holders)
    problems.sort(key=lambda problem: reader.order(problem.field))
    warnings = list(reader.warnings)
    if all(problem.refused for problem in problems):
        warnings += [words.text(text) for text in entry.warnings_of(config) if words.is_written(text)]
        warnings += [words.text(text) for text in secret_warnings(config)]
        # One key may set a field of the sampler and of validation, and is wrong once
        checked = words.translate([*entry.check(config), *alone_in_its_group(settled, config)])
        problems += dict.fromkeys(checked)
        reader.unsupported += words.translate(_unsupported(entry, config, here=reader.here))
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
        slips=tuple(reader.slips),
    )


def _unsupported(entry: Entry, config: Any, *, here: bool) -> list[Problem]:
    """List the problems that stop a run, not a plan. Those that --here solves name it; others keep their advice."""
    found = list(entry.unsupported(config))
    if here or not found:
        return found
    stays = {(problem.what, problem.field) for problem in entry.unsupported(at_hand(config)[0])}
    return [
        problem if (problem.what, problem.field) in stays else replace(problem, fix="--here runs without it")
        for problem in found
    ]


def _look_at_every_key(dialect: Dialect, reader: Reader, known: Known) -> None:
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
        if row is None and ledger.is_section(key):
            reject_no_section(reader, key, value)
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
        if value is None and (key in ledger.emptied or (reader.of_checkout(key) and not fits(None, row.type))):
            reader.put(key, None if row.default is ABSENT else row.default)
            continue
        if not inside and not right_type(reader, key, value, row):
            continue
        takes_any = inside or row.name.endswith(".**") or (row.name.endswith(".*") and known.has_options(key))
        if (
            takes_any
            and reader.named(key)
            and not reader.of_checkout(key)
            and not right_option(reader, known, key, value, row)
        ):
            continue
        _by_status(reader, key, value, row)


def _unknown(dialect: Dialect, reader: Reader, known: Known, key: str) -> None:
    where = reader.sources.where(key)
    above = next((parent for parent in parents(key) if reader.named(parent)), "")
    if not reader.named(key) and above and not reader.ledger.is_section(above) and known.guess(above):
        if above in reader.bad:
            return
        reader.bad.add(above)  # a misspelled section, which is reported once for all that it refers to
        key, where = above, reader.sources.where(above)
    if not reader.named(key):  # it came with the section that another one refers to, which has its own look at it
        why = "the section that is referred to has it, and nothing reads it here"
        reader.ignored.append(Ignored(key=key, reason=why, where=where, asks=False))
        return
    if any(f"{key}.".startswith(f"{other}.") for other in reader.referred):
        reader.ignored.append(Ignored(key=key, reason="a helper: other keys refer to it", where=where, asks=False))
        return
    own = Own(key=key, value=value_at(reader.values, key), where=where, of_checkout=reader.of_checkout(key))
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


def _settle_own_keys(reader: Reader, known: Known) -> Settled:
    """Handle all keys of the user's own together."""
    read = read_by_own(reader) | _read_from_files(reader)
    own = sorted((one for one in reader.own if one.key not in read), key=lambda one: reader.order(one.key))

    def holds(key: str, value: Any) -> bool:
        return reader.ledger.find(key) is not None and same(reader[key], value)

    settled = settle(own, known, reader.own_keys, drop=reader.drops, holds=holds, held=reader.named)
    reader.ignored += settled.ignored
    reader.problems += settled.problems
    reader.unsupported += settled.unsupported
    refused = {problem.field for problem in settled.problems}
    for one in own:
        if one.key in refused:
            let_its_value_stand(reader, known, one)
    return settled


def _reject_known_own_keys(reader: Reader, known: Known) -> None:
    """A key of the peer's among the user's own, unless its value was the user's own and is left out."""
    for key in reader.own_keys:
        row = reader.ledger.find(key)
        if row is not None and not known.is_free(row) and key not in reader.left_out:
            reader.problem(
                f"{OWN_KEYS} names {key}, which is {reader.ledger.dialect}'s and is read",
                key=OWN_KEYS,
                fix="take it out of the list",
            )


def _read_from_files(reader: Reader) -> set[str]:
    """Let KEY_path and KEY_file, which no version has, name the file of what KEY holds as text, where we read it from files.
    Returns: these keys."""
    found = set()
    for own in reader.own:
        base, _, ending = own.key.rpartition("_")
        row = reader.ledger.find(base) if ending in ("path", "file") and isinstance(own.value, str) else None
        field = f"{row.fields[0]}_file" if row is not None and len(row.fields) == 1 else ""
        if row is not None and "text" in type_text(row.type) and has_key(field):
            reader.put(f"{OUR_SECTION}.{field}", own.value)
            reader.warn(f"{own.key} is yours, and is read as {OUR_SECTION}.{field}: the file of {base}")
            found.add(own.key)
    return found


def _by_status(reader: Reader, key: str, value: Any, row: Key) -> None:
    if row.status == "ignored":
        requested = reader.named(key) and not reader.of_checkout(key)
        asks = requested and not any(same(value, one) for one in row.asks_nothing)
        reader.ignored.append(Ignored(key=key, reason=row.reason, where=reader.sources.where(key), asks=asks))
    elif row.status in ("refused", "planned") and not any(same(value, one) for one in row.asks_nothing):
        if row.status == "refused":
            reader.problem(f"{key} is refused: {row.reason}", key=key, refused=True)
        elif row.cluster and reader.here:
            reader.ignored.append(
                Ignored(key=key, reason=f"--here does without: {row.reason}", where=reader.sources.where(key))
            )
        else:
            reader.plan_only(f"{key} is planned: {row.reason}", key=key, fix="remove it to run without")


def _fields(dialect: Dialect, reader: Reader, entry: str) -> dict[str, Any]:
    """Our fields, as the rows and the rules of a dialect say.

    Raises: ConfigError with the problems so far, where a rule can make nothing of the default that stands in for a value of
        the wrong type.
    """
    try:
        return _direct(reader) | dialect.rules[entry](reader)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        if not reader.bad:
            raise
        raise ConfigError(
            sorted([*reader.problems, *reader.slips], key=lambda problem: reader.order(problem.field))
        ) from None


def _leave_out_what_is_off(reader: Reader) -> None:
    """Drop what is planned or refused below a section that the rules ignore: it is off, and reported with the section."""
    off = {each.key for each in reader.ignored}
    reader.unsupported[:] = [each for each in reader.unsupported if off.isdisjoint(parents(each.field))]
    reader.problems[:] = [each for each in reader.problems if not each.refused or off.isdisjoint(parents(each.field))]


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
    return {name: value for name, value in fields.items() if f"{OUR_SECTION}.{name}" not in (OWN_KEYS, OWN_REWARDS)}


def _only_what_engines_read(fields: dict[str, Any], reader: Reader, words: Words) -> dict[str, Any]:
    """Drop engine options that the chosen engine does not have; written ones are reported. With --here the plain engines
    will be chosen."""
    kept = {}
    if reader.here:  # dropped below, and wrong all the same
        reader.problems += wrong_options(fields, reader)
    for name, value in fields.items():
        ignored_by = engine_without(name, fields, here=reader.here)
        if ignored_by is None:
            kept[name] = value
        elif key := words.key(name):
            section = key.removesuffix("**")
            # An open-ended row has all options of a section in one field, by their names there
            inside = leaves(value) if section != key and isinstance(value, dict) else ()
            for each in (key, *(f"{section}{option}" for option, _ in inside)):
                reader.ignore(each, f"the {ignored_by} engine has no such setting")
    return kept


def _new(found: Iterable[Problem], reader: Reader, words: Words) -> list[Problem]:
    """Problems of the configuration that are not about a key that is reported already."""
    for key in {words.key(problem.field) for problem in found}:
        if key and reader.named(key) and value_at(reader.values, key) == "":
            reader.empty(key)
    reported = {problem.field for problem in reader.problems}
    return [problem for problem in found if words.key(problem.field) not in reported]
