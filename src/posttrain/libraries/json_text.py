"""JSON that somebody else wrote: a row of data, a request, a model's tool call. How deep it nests is limited.

``json`` parses some 990 levels; what then copies, compares or writes such a value recurses too, and fails far from its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_DEPTH = 100
_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(text: str | bytes | bytearray, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON of at most MAX_DEPTH levels.

    Raises: json.JSONDecodeError, also for deeper values.
    """
    try:
        value = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise _too_deep(text) from None
    if isinstance(text, str):
        brackets = text.count("[") + text.count("{")
    else:
        brackets = text.count(b"[") + text.count(b"{")
    if brackets > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise _too_deep(text)
    return value


def deeper_than(value: Any, levels: int) -> bool:
    """Return True when lists and mappings nest more than ``levels`` deep. Does not recurse."""
    layer = [value]
    for _ in range(levels):
        layer = [inner for each in layer for inner in _inside(each) if isinstance(inner, dict | list)] if layer else []
    return bool(layer)


def half_character(value: Any) -> tuple[str, str] | None:
    """Return the first surrogate that stands alone, which JSON can write and no text can hold, and the dotted key it is under;
    None when there is none."""
    waiting = [("", value)]
    while waiting:
        key, each = waiting.pop()
        if isinstance(each, str):
            if not each.isascii() and (half := _SURROGATE.search(each)):
                return key, half[0]
        elif isinstance(each, Mapping):
            names = [(key, name) for name in each]
            waiting += [*reversed([(f"{key}.{name}".lstrip("."), inner) for name, inner in each.items()]), *names]
        elif isinstance(each, list | tuple):
            waiting += reversed([(f"{key}.{place}".lstrip("."), inner) for place, inner in enumerate(each)])
    return None


def whole_characters(value: Any) -> Any:
    """Copy a value of JSON's kinds with every lone surrogate replaced by U+FFFD, and two halves joined; the value itself where
    there is none."""
    return _replaced(value) if half_character(value) else value


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_replaced(name): _replaced(inner) for name, inner in value.items()}
    return [_replaced(inner) for inner in value] if isinstance(value, list | tuple) else value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(text: str | bytes | bytearray) -> json.JSONDecodeError:
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return json.JSONDecodeError(f"lists and mappings nest more than {MAX_DEPTH} deep", shown, 0)
