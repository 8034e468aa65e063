"""Following the ``${...}`` of a configuration: here where they are plain, with OmegaConf otherwise."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.config.reading.plain_references import MISSING, REFERENCE, followed
from posttrain.config.reading.sources import SourceMap

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

    OmegaConf is slow, and few keys hold or are referred to by a ``${...}`` that is not plain: it sees only those, unless one
    needs all.
    """
    found = followed(values)
    if found is not None:
        return found
    from posttrain.config.reading.omegaconf_reading import resolve_all

    touched = _touched(values)
    if touched is None:
        return resolve_all(values, sources)
    found = copy.deepcopy(values)
    return merged(found, resolve_all(_subset(values, touched), sources)) if touched else found


def _touched(values: Any) -> list[tuple[Any, ...]] | None:
    """List the paths of the texts to resolve and of the keys they refer to; None where not all references can be read here."""
    paths: list[tuple[Any, ...]] = []
    for path, text in _texts(values, ()):
        if text != MISSING and "${" not in text:
            continue
        paths.append(path)
        paths += [tuple(name.split(".")) for name in REFERENCE.findall(text)]
        if "${" in _ENVIRONMENT.sub("", REFERENCE.sub("", text)):
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


def merged(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid upon ``under``, which is changed: sections merge, everything else is replaced."""
    for key, value in over.items():
        below = under.get(key)
        under[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return under
