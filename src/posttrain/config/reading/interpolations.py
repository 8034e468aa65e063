"""Following the ``${...}`` of a configuration with OmegaConf, and the problems of those that lead nowhere."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.reading import hydra
from posttrain.config.reading.sources import SourceMap, child
from posttrain.errors import ConfigError, Problem, nearest

MISSING = "???"
# An absolute reference to a key, and a text of the environment: all that most configurations hold.
_REFERENCE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
_ENVIRONMENT = re.compile(r"(?<!\\)\$\{oc\.env:[^${}]*\}")


_VARIABLE = re.compile(r"(?<!\\)\$\{oc\.env:\s*(\w+)\s*\}")


def name_unset_variables(values: Any, unset: set[str]) -> Any:
    """The values, with the name of each environment variable that is not set in the place of its ``${oc.env:NAME}``.

    A plan that does not look at this machine uses it. Args: the names are added to ``unset``.
    """
    if isinstance(values, dict):
        return {key: name_unset_variables(value, unset) for key, value in values.items()}
    if isinstance(values, list):
        return [name_unset_variables(value, unset) for value in values]
    if not isinstance(values, str) or "oc.env" not in values:
        return values

    def named(match: re.Match[str]) -> str:
        if match[1] in os.environ:
            return match[0]
        unset.add(match[1])
        return match[1]

    return _VARIABLE.sub(named, values)


def resolve(values: dict[str, Any], sources: SourceMap) -> dict[str, Any]:
    """Follow every ``${...}``. All that lead nowhere are reported together.

    OmegaConf is slow, and few keys hold or are referred to by a ``${...}``: it sees only those, unless one needs all.
    """
    touched = _touched(values)
    if touched is None:
        return _resolve(values, sources)
    found = copy.deepcopy(values)
    return merged(found, _resolve(_subset(values, touched), sources)) if touched else found


def _touched(values: Any) -> list[tuple[Any, ...]] | None:
    """List the paths of the texts to resolve and of the keys they refer to; None where not all references can be read here."""
    paths: list[tuple[Any, ...]] = []
    for path, text in _texts(values, ()):
        if text != MISSING and "${" not in text:
            continue
        paths.append(path)
        paths += [tuple(name.split(".")) for name in _REFERENCE.findall(text)]
        if "${" in _ENVIRONMENT.sub("", _REFERENCE.sub("", text)):
            return None
    return paths


def _texts(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Find the texts below a node, each with its path down to a list or its key."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(node, list):
        for inner in node:
            yield from ((path, text) for _, text in _texts(inner, path))


def _subset(values: dict[str, Any], paths: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Keep the keys on ``paths`` with everything below their ends."""
    kept: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in paths):
        if name in values:
            below = [path[1:] for path in paths if path[0] == name]
            inner = values[name]
            kept[name] = _subset(inner, below) if isinstance(inner, dict) and all(below) else inner
    return kept


def _resolve(values: dict[str, Any], sources: SourceMap) -> dict[str, Any]:
    hydra.register_resolvers()
    try:
        config = OmegaConf.create(values)
    except OmegaConfBaseException as error:
        raise ConfigError(omegaconf_problem(error, sources)) from None
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # the first of them; looking for all takes as long again
        raise ConfigError(list(_unresolvable(config, "", sources)) or omegaconf_problem(error, sources)) from None
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _unresolvable(node: Container, path: str, sources: SourceMap) -> Iterator[Problem]:
    keys: Sequence[Any] = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))  # type: ignore[arg-type]
    for key in keys:
        name = child(path, key)
        if OmegaConf.is_interpolation(node, key):
            try:
                node[key]
            except OmegaConfBaseException as error:
                written = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
                what, fix = _interpolation_error(str(written), error, sources)
                yield Problem(what, where=sources.where(name), fix=fix)
        elif OmegaConf.is_missing(node, key):
            yield Problem(f"{name} must be given: ??? stands in its place", where=sources.where(name))
        elif isinstance(node[key], DictConfig | ListConfig):
            yield from _unresolvable(node[key], name, sources)


def _interpolation_error(written: str, error: Exception, sources: SourceMap) -> tuple[str, str]:
    """Describe the problem of an interpolation, and its fix."""
    reason = str(error).splitlines()[0]
    if match := re.search(r"Environment variable '(.+?)' not found", reason):
        name = match[1]
        return (
            f"the environment variable {name} is not set ({written})",
            f"set it, or give a default: ${{oc.env:{name},...}}",
        )
    if match := re.search(r"Interpolation key '(.+?)' not found", reason):
        guess = nearest(match[1], sources.places)
        fix = f"did you mean ${{{guess}}}?" if guess else "only keys that are written can be referred to, not defaults"
        return f"{written} refers to {match[1]}, which is not written anywhere", fix
    if match := re.search(r"Unsupported interpolation type (\S+)", reason):
        return f"{written} asks for a resolver {match[1]!r} that does not exist", "oc.env, oc.select, now and ${key} do"
    return f"{written} cannot be resolved: {reason}", ""


def omegaconf_problem(error: OmegaConfBaseException, sources: SourceMap) -> Problem:
    """Describe an error that OmegaConf raises at once: a ``${`` that is not closed, a value of an unsupported type."""
    key = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")
    return Problem(str(error).splitlines()[0], where=sources.where(key) if key else sources.file or "")


def merged(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid upon ``under``, which is changed: sections merge, everything else is replaced."""
    for key, value in over.items():
        below = under.get(key)
        under[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return under
