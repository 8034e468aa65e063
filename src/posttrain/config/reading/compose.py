"""A YAML file and overrides become one plain nested dict, and every key keeps the place where it was written.

OmegaConf's reading of YAML (``1e-6`` is a number) and of ``${...}``, Hydra's grammar of overrides and its defaults lists.
Knows no dialect.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.config.base import Reference
from posttrain.config.reading import hydra
from posttrain.config.reading.interpolations import merged, name_unset_variables, resolve
from posttrain.config.reading.overrides import Assignment, KnownKeys, apply_overrides, parse_overrides
from posttrain.config.reading.plain_references import MISSING
from posttrain.config.reading.plain_yaml import plain_yaml
from posttrain.config.reading.references import find_references, referred_keys, value_holders
from posttrain.config.reading.sources import Place, SourceMap, child, places_of_yaml
from posttrain.config.reading.unreadable import unreadable
from posttrain.config.reading.validate import show
from posttrain.errors import ConfigError, Problem
from posttrain.libraries import json_text

_ESCAPED = re.compile(r"(?<!\\)(\\*)\1\\\$\{")  # 2n + 1 backslashes stand for n and a plain ${
_LONGEST = 10_000_000  # characters of a file; a device such as /dev/zero never ends


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, in the user's own words."""

    values: dict[str, Any]  # nested, plain, every ${...} resolved
    sources: SourceMap
    # Overrides that could not be applied, where keys are known; else they are raised.
    problems: tuple[Problem, ...] = ()
    # Where each key of Hydra's own section was written; they are not in ``values``.
    hydra: Mapping[str, str] = field(default_factory=dict)
    # Keys with ??? (OmegaConf's word for a value to be given), where a dialect's default stands in.
    open: tuple[str, ...] = ()
    # Keys with ??? that have no default: they are left out.
    missing: tuple[str, ...] = ()
    # Texts that were read from environment variables: key, value, and the text with ${oc.env:…}.
    references: tuple[Reference, ...] = ()
    # Keys that others refer to with ${...}.
    referred: frozenset[str] = frozenset()
    # Keys whose whole value is a reference to another -> the key, as it is written, that holds the value.
    holders: Mapping[str, str] = field(default_factory=dict)
    # Environment variables that are not set, and whose names stand for their values.
    unset: tuple[str, ...] = ()
    # Sections that a dialect reads under another name -> their own names.
    names: Mapping[str, str] = field(default_factory=dict)


def compose(
    path: str | None,
    overrides: Sequence[str],
    *,
    struct: bool = False,
    base: Mapping[str, Any] | None = None,
    known: KnownKeys | None = None,
    read: Callable[[str], tuple[dict[str, Any], dict[str, Place]]] | None = None,
    groups: Callable[[list[Assignment], dict[str, Any], dict[str, Place]], list[Assignment]] | None = None,
    leave_out_missing: bool = False,
    name_unset: bool = False,
) -> Composed:
    """Read ``path`` (None: nothing but overrides), apply the overrides in order, resolve interpolations.

    Args: ``struct`` is Hydra's rule that an override of a key which is not there yet needs a ``+``, unless it is ``known``;
        ``base`` holds the values of keys that are missing, or left open with ???; ``read`` reads a file, and is read_yaml
        unless a dialect has defaults lists; ``groups`` lays the files of options into the values, and returns the other
        overrides; ``leave_out_missing`` lists keys with ??? for which ``base`` has no value, instead
        of raising; ``name_unset`` lets the name of an environment variable that is not set stand for its value.
    Raises: ConfigError with file and line, or the override: a file that cannot be read, broken YAML, a key written twice,
        an override that cannot be parsed or applied, an interpolation that leads nowhere, a ``???`` without a value.
    """
    values, places = (read or read_yaml)(path) if path is not None else ({}, {})
    assignments = parse_overrides(overrides)
    if groups is not None:
        assignments = groups(assignments, values, places)
    problems = apply_overrides(
        values, places, [one for one in assignments if not one.of_hydra], struct=struct, known=known
    )
    if problems and known is None:
        raise ConfigError(problems)
    hydra_keys = hydra.set_aside(values, places) | {one.key: one.where for one in assignments if one.of_hydra}
    sources = SourceMap(path, places)
    left_open: list[str] = []
    missing: list[str] = []
    referred, holders = frozenset(referred_keys(values)), value_holders(values)
    written = values
    if base is not None:
        _close(values, base, "", left_open, missing if leave_out_missing else None)
        values = merged(copy.deepcopy(dict(base)), values)
    unset: set[str] = set()
    values = name_unset_variables(values, unset) if name_unset else values
    try:
        resolved = resolve(values, sources)
    except ConfigError:
        if no_sections := [*_no_sections(written, base or {}, "", sources)]:
            raise ConfigError(no_sections) from None  # why the references into them lead nowhere
        raise
    if half := json_text.half_character(resolved):
        key, where = half[0], sources.where(half[0]).encode(errors="replace").decode()
        what = f"{key} holds half a character, {half[1]!r}, or a byte that is not UTF-8"
        raise ConfigError(Problem(what, where=where, fix="write the whole character"))
    found = find_references(values, resolved)
    return Composed(
        values=resolved,
        sources=sources,
        problems=tuple(problems),
        hydra=hydra_keys,
        open=tuple(left_open),
        missing=tuple(missing),
        references=found,
        referred=referred,
        holders=holders,
        unset=tuple(sorted(unset)),
    )


def read_saved(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a run's config.yaml for programs that show it. Returns: its values with every ${oc.env:…} as it is written; and its
    sections run and tracking, resolved.

    Raises: ConfigError as ``compose``.
    """
    values, places = read_yaml(path)
    sections: dict[str, Any] = {name: values[name] for name in ("run", "tracking") if name in values}
    return _unescaped(values), resolve(sections, SourceMap(path, places))


def _unescaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unescaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_unescaped(inner) for inner in value]
    if isinstance(value, str):
        return _ESCAPED.sub(lambda found: found[1] + "${", value)
    return value


def _close(values: dict[str, Any], base: Any, path: str, found: list[str], missing: list[str] | None) -> None:
    """Remove every ??? for which ``base`` has a value, and list its key in ``found``; all others in ``missing``, if given."""
    for key in list(values):
        value, under, name = values[key], base.get(key) if isinstance(base, Mapping) else None, child(path, key)
        if isinstance(value, dict):
            _close(value, under, name, found, missing)
        elif value == MISSING and (under is not None or missing is not None):
            del values[key]
            found.append(name) if under is not None or missing is None else missing.append(name)


def _no_sections(
    values: Mapping[str, Any], base: Mapping[str, Any], above: str, sources: SourceMap
) -> Iterator[Problem]:
    """Find the values that stand where ``base`` has a section of keys."""
    for name, value in values.items():
        key, under = child(above, name), base.get(name)
        if not isinstance(under, Mapping) or not under or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _no_sections(value, under, key, sources)
        elif not (isinstance(value, str) and "${" in value):
            what = f"{key} must be a section of key: value lines, not {show(value)}"
            yield Problem(
                what, where=sources.where(key), fix=f"write its keys below it, such as {key}.{next(iter(under))}"
            )


def read_yaml(path: str) -> tuple[dict[str, Any], dict[str, Place]]:
    """The file's values, interpolations untouched, and the place of every key."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(path, error)) from None
    if len(text) > _LONGEST:
        raise ConfigError(Problem(f"{path} has more than {_LONGEST:,} characters; a configuration has fewer"))
    values, places = _parsed(text, path)
    return copy.deepcopy(values), dict(places)


@lru_cache(maxsize=8)
def _parsed(text: str, path: str) -> tuple[dict[str, Any], dict[str, Place]]:
    """Parse a file's text, once for all who look at it: what finds its dialect, its entry point, and its values."""
    places = places_of_yaml(text, path)
    values = plain_yaml(text)
    if values is None:
        from posttrain.config.reading.omegaconf_reading import parse

        values = parse(text, path, places)
    return values, places
