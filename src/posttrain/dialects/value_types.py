"""Types of a dialect's values, written as text in its tables: ``int | null``, ``int from 0``, ``int up to 1000``,
``float from 0``, ``one of a, b``, ``list of int``, ``section``."""

from __future__ import annotations

import builtins
import math
import re
import types
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin


class Share(float):
    """The type of a part of the whole: above 0, at most 1."""


class Bounded(float):
    """Base of the types ``int from A``, ``int up to B``, ``float from A up to B``: finite numbers, both bounds among them."""

    kind: builtins.type
    least: float
    most: float


_NAMES: dict[str, Any] = {
    "any": Any,
    "null": None,
    "text": str,
    "section": dict,
    "list": list,
    "int": int,
    "float": float,
    "bool": bool,
    "share": Share,
}
_TEXTS = {type: name for name, type in _NAMES.items()}


@cache
def parse_type(text: str) -> Any:
    """The type that a text names; the inverse of type_text.

    Raises: ValueError for a name that is not a type.
    """
    parts = text.split(" | ")
    return reduce(or_, (_single(part) for part in parts[1:]), _single(parts[0]))


def _single(text: str) -> Any:
    if text in _NAMES:
        return _NAMES[text]
    if (bounds := re.fullmatch(r"(int|float)( from (\S+))?( up to (\S+))?", text)) is not None:
        return _bounded(text, _NAMES[bounds[1]], float(bounds[3] or "-inf"), float(bounds[5] or "inf"))
    if text.startswith("one of "):
        return Literal[tuple(text.removeprefix("one of ").split(", "))]
    if text.startswith("list of "):
        return list[_single(text.removeprefix("list of "))]  # type: ignore[misc]
    raise ValueError(
        f"{text!r} is not a type (known: {', '.join(_NAMES)}, int from …, int up to …, one of …, list of …)"
    )


@cache
def _bounded(text: str, kind: type, least: float, most: float) -> type[Bounded]:
    return type(text, (Bounded,), {"kind": kind, "least": least, "most": most})


def type_text(type: Any) -> str:
    """A type as the tables and messages print it: ``int | null``, ``one of a, b``.

    Not cached by the type: unions of the same parts in another order are equal, and are printed otherwise.
    """
    if type is types.NoneType:
        return "null"
    if get_origin(type) is Literal:
        return "one of " + ", ".join(_value_text(value) for value in get_args(type))
    if get_origin(type) in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in get_args(type))
    if get_origin(type) is list:
        return f"list of {type_text(get_args(type)[0])}"
    return _TEXTS.get(get_origin(type) or type) or str(type.__name__)


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def fits(value: Any, type: Any) -> bool:
    """True when the value has the type. Whole numbers are numbers; truth values and NaN are not; 2.0 is no whole number."""
    if type is Any:
        return True
    if type is None or type is types.NoneType:
        return value is None
    origin = get_origin(type)
    if origin is Literal:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in get_args(type))
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(type))
    if origin is list or type is list:
        inner: Sequence[Any] = get_args(type)
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value if inner)
    if isinstance(type, builtins.type) and issubclass(type, Bounded):
        return fits(value, type.kind) and math.isfinite(value) and type.least <= value <= type.most
    if type is Share:
        return fits(value, float) and 0 < value <= 1
    if type is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type)


def choices(type: Any) -> list[Any]:
    """The values that a type with Literal names; empty for others."""
    if get_origin(type) is Literal:
        return list(get_args(type))
    if get_origin(type) in (Union, types.UnionType):
        return [value for part in get_args(type) for value in choices(part)]
    return []
