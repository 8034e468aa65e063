"""The ``${...}`` that most configurations hold: keys by their full name, and environment variables. OmegaConf follows the others,
and reports those that lead nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
REFERENCE = re.compile(rf"(?<!\\)\$\{{({_NAME})\}}")
_PLAIN = re.compile(rf"\$\{{(?:oc\.env:(?P<variable>[A-Za-z_]\w*)|(?P<key>{_NAME}))\}}")
MISSING = "???"
_SCALARS = (str, int, float, bool)


class NotPlain(Exception):
    """A reference that only OmegaConf follows."""


def is_plain(value: Any) -> bool:
    """Return True for what OmegaConf takes as it is: texts, numbers and truth values in lists and mappings of texts, where ``${``
    begins nothing but a plain reference."""
    if isinstance(value, str):
        return "${" not in value or ("\\" not in value and "${" not in _PLAIN.sub("", value))
    if isinstance(value, dict):
        return all(type(name) is str and is_plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float, bool)


def followed(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Copy a configuration with the values of its references in their place. Returns: None where OmegaConf must follow one, or
    report one: it is no plain reference, it refers to itself or to nothing, or a value is yet to be given (???).
    """
    try:
        found: dict[str, Any] = _followed(values, values)
    except (NotPlain, RecursionError):
        return None
    return found


def _followed(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, str):
        return _value(node, values) if "${" in node or node == MISSING else node
    if isinstance(node, dict):
        return {name: _followed(inner, values) for name, inner in node.items()}
    return [_followed(inner, values) for inner in node] if isinstance(node, list) else node


def _value(text: str, values: Mapping[str, Any]) -> Any:
    """The value of a text with references. Raises: NotPlain; RecursionError for one that refers to itself."""
    if text == MISSING or not is_plain(text):
        raise NotPlain
    if whole := _PLAIN.fullmatch(text):
        return _target(whole, values)
    return _PLAIN.sub(lambda match: _written(_target(match, values)), text)


def _written(value: Any) -> str:
    """A value within a longer text. Raises: NotPlain for nothing, a list and a section."""
    if type(value) not in _SCALARS:
        raise NotPlain
    return str(value)


def _target(match: re.Match[str], values: Mapping[str, Any]) -> Any:
    """The value that a reference leads to. Raises: as ``_value``."""
    if name := match["variable"]:
        found: Any = os.environ.get(name)
        if found is None or "${" in found:
            raise NotPlain
        return found
    found = values
    for part in match["key"].split("."):
        if not isinstance(found, dict) or part not in found:
            raise NotPlain
        found = found[part]
    return _followed(found, values)
