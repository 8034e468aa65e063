"""Conversions that a row of a table can name in its column ``convert``: their value becomes ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    # one text becomes a list of one, null the empty list
    "as_list": _as_list,
    "as_text": lambda value: str(value) if isinstance(value, int) else value,
    "null_is_empty": lambda value: value or [],
    "null_is_one": lambda value: value or 1,
    "zero_is_null": lambda value: value or None,
    "positive_or_null": lambda value: value if value and value > 0 else None,
    "minus_one_is_zero": lambda value: 0 if value == -1 else value,
    "at_least_zero": lambda value: max(value, 0),
    "true_is_one": lambda value: 1 if value else None,
    "true_is_bfloat16": lambda value: "bfloat16" if value else "float32",
    "truncate_side": lambda value: value if value == "error" else f"truncate_{value}",
    "ground_truth_below": lambda value: f"{value}.ground_truth",
}


def converter(spec: str | Mapping[str, Any]) -> Callable[[Any], Any]:
    """The conversion of that name; a mapping replaces the values it holds and leaves others as they are.

    Raises: ValueError for a name that is not registered.
    """
    if not isinstance(spec, str):
        return lambda value: spec.get(value, value) if isinstance(value, str) else value
    if spec not in CONVERTERS:
        raise ValueError(f"there is no converter {spec!r} (known: {', '.join(sorted(CONVERTERS))})")
    return CONVERTERS[spec]
