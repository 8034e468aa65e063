"""Checks of the types of what a caller passes; nothing heavy is imported for them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from posttrain.errors import Problem, RequestError


def check_items(items: Any, kind: type | tuple[type, ...], name: str, source: str) -> None:
    """Raises: RequestError unless ``items`` is a list or tuple of ``kind``; ``source`` says where such items come from."""
    if not isinstance(items, list | tuple):
        raise RequestError(Problem(f"{name} is a list, not {type(items).__name__}", fix=source))
    for item in items:
        if not isinstance(item, kind):
            raise RequestError(Problem(f"{name} holds {type(item).__name__}", fix=source))


def check_kind(value: Any, kinds: type | tuple[type, ...], name: str, source: str) -> None:
    """Raises: RequestError unless ``value`` is one of ``kinds``; ``source`` says where such values come from."""
    if not isinstance(value, kinds):
        known = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise RequestError(Problem(f"{name} must be {known}, not {type(value).__name__}", fix=source))


def check_step(step: Any) -> None:
    """Raises: RequestError unless ``step`` is a whole number, of Python or of numpy."""
    if isinstance(step, bool) or not isinstance(step, Integral):
        raise RequestError(
            Problem(f"step must be int, not {type(step).__name__}", fix="the column step of run.metrics has them")
        )
