"""Values that cross between processes, as JSON; values that JSON has no form for are tagged. Never pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from json.encoder import encode_basestring_ascii
from typing import Any

_TAG = "~"  # {"~": kind, "of": value}

_AS_THEY_ARE = frozenset([str, int, float, bool, type(None)])
_TEXT = frozenset([str])
_KINDS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    Decimal: ("decimal", str),
    datetime: ("datetime", datetime.isoformat),
    date: ("date", date.isoformat),
    time_of_day: ("time", time_of_day.isoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    tuple: ("tuple", lambda value: _items(value)),
    set: ("set", lambda value: _items(value)),
}
_BACK: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time_of_day.fromisoformat,
    "timedelta": lambda value: timedelta(*value),
    "tuple": tuple,
    "set": set,
    "items": dict,
}


def to_bytes(value: Any) -> bytes:
    """Write a value as JSON.

    Raises: TypeError for a value of a kind that datasets do not hold; ValueError for an integer of thousands of digits.
    """
    return to_text(value).encode()


def to_text(value: Any) -> str:
    """``to_bytes`` as text, which may be put into the text of other values."""
    if type(value) is str:  # as json.dumps writes it: most values are responses
        return encode_basestring_ascii(value)
    return "null" if value is None else json.dumps(_plain(value))


def from_bytes(data: bytes | str) -> Any:
    """Restore the value that ``to_bytes`` or ``to_text`` was given. Raises: ValueError for anything that it does not write."""
    try:
        return json.loads(data, object_hook=_restored)
    except (RecursionError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not what a worker writes: {type(error).__name__}") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind in _KINDS:
        name, write = _KINDS[kind]
        return {_TAG: name, "of": write(value)}
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list):
        return _items(value)
    if isinstance(value, (dict, Mapping)):
        if _TAG not in value and (_TEXT.issuperset(map(type, value)) or all(isinstance(key, str) for key in value)):
            if kind is dict and _AS_THEY_ARE.issuperset(map(type, value.values())):
                return value
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "items", "of": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):  # a NumPy array or number
        return _plain(value.tolist())
    raise TypeError(f"a {kind.__name__} cannot be handed to another process")


def _items(values: Collection[Any]) -> list[Any]:
    if _AS_THEY_ARE.issuperset(map(type, values)):  # as the token ids of a prompt
        return list(values)
    return [_plain(item) for item in values]


def _restored(value: dict[str, Any]) -> Any:
    return _BACK[value[_TAG]](value["of"]) if _TAG in value else value
