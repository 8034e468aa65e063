"""References in a configuration: texts that come from environment variables, and keys that other keys refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.config.base import Reference
from posttrain.config.reading.sources import child

_ENVIRONMENT = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:")
_WHOLE = re.compile(r"\$\{[^{}]*\}")
_KEY = re.compile(r"\$\{\s*(?:oc\.select\s*:\s*)?(\.*)([^\s{}:,.][^\s{}:,]*)\s*[,}]")


def find_references(written: Any, resolved: Any) -> tuple[Reference, ...]:
    """Compare a configuration as it is written with its resolved values. Returns: every text that holds ${oc.env:…}, directly
    or through another key."""
    found = list(_references(written, resolved, ""))
    return (*found, *_indirect(written, resolved, "", found))


def _references(written: Any, resolved: Any, key: str) -> Iterator[Reference]:
    """Find the texts with ${oc.env:…}."""
    if isinstance(written, str):
        if _ENVIRONMENT.search(written) and isinstance(resolved, str):
            yield key, resolved, written
    elif isinstance(written, dict | list) and isinstance(resolved, type(written)):
        items = written.items() if isinstance(written, dict) else enumerate(written)
        for name, inner in items:
            below = resolved.get(name) if isinstance(resolved, dict) else resolved[name]
            yield from _references(inner, below, child(key, name))


def _indirect(written: Any, resolved: Any, key: str, found: Sequence[Reference]) -> Iterator[Reference]:
    """Find the texts that refer to one of ``found``, alone or in a longer text."""
    if isinstance(resolved, str):
        if isinstance(written, str) and (written == resolved or _ENVIRONMENT.search(written)):
            return
        for _, value, text in sorted(found, key=lambda one: -len(one[1])):
            if value and value in resolved:
                yield key, resolved, resolved.replace(value, text)
                return
    elif isinstance(resolved, dict | list):
        items = resolved.items() if isinstance(resolved, dict) else enumerate(resolved)
        for name, inner in items:
            there = isinstance(written, type(resolved))
            yield from _indirect(written[name] if there else None, inner, child(key, name), found)


def referred_keys(values: Any, key: str = "") -> Iterator[str]:
    """Find the keys that ``${key}``, ``${..key}`` and ``${oc.select:key,…}`` in a configuration refer to.

    Args: ``values`` with no reference resolved; ``key`` is their own dotted key.
    """
    if isinstance(values, str):
        for dots, name in _KEY.findall(values) if "${" in values else ():
            above = key.split(".")[: -len(dots)] if dots else []
            yield ".".join([*above, re.sub(r"\[(\w+)\]", r".\1", name)])
    elif isinstance(values, dict | list):
        for name, inner in values.items() if isinstance(values, dict) else enumerate(values):
            yield from referred_keys(inner, child(key, name))


def value_holders(values: Any) -> dict[str, str]:
    """Find the keys whose whole value is a reference, and the keys that hold their values in the end; those of no written key are
    left out. Args: as ``referred_keys``."""
    refers = dict(_whole_references(values, ""))
    found = {}
    for key in refers:
        passed = [key]
        while passed[-1] in refers and refers[passed[-1]] not in passed:
            passed.append(refers[passed[-1]])
        if passed[-1] not in refers:
            found[key] = passed[-1]
    return found


def _whole_references(values: Any, key: str) -> Iterator[tuple[str, str]]:
    """Find the keys that hold one reference and nothing beside it, with the key that it names, where that is written."""
    flat = dict(_leaves(values, key))
    sections = {place.rsplit(".", above)[0] for place in flat for above in range(1, place.count(".") + 1)}
    for place, value in flat.items():
        text = value.strip() if isinstance(value, str) else ""
        named = list(referred_keys(text, place)) if _WHOLE.fullmatch(text) else []
        if len(named) == 1 and (named[0] in flat or named[0] in sections):
            yield place, named[0]


def _leaves(values: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for name, inner in values.items():
            yield from _leaves(inner, child(key, name))
    else:
        yield key, values
