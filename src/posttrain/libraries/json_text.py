"""JSON that somebody else wrote: a row of data, a request, a model's tool call. How deep it nests is limited.

``json`` parses some 990 levels; what then copies, compares or writes such a value recurses too, and fails far from its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 100


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


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(text: str | bytes | bytearray) -> json.JSONDecodeError:
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return json.JSONDecodeError(f"lists and mappings nest more than {MAX_DEPTH} deep", shown, 0)
