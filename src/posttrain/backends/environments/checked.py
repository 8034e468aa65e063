"""Single values that an environment gives, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from posttrain.interfaces.env import TurnOptions


class BadAnswer(Exception):
    """An environment returned something else than it should; the message names it."""


def marks(value: Any) -> dict[int, list[bool]] | None:
    """Marks of tokens by conversation, whose numbers may have become texts on their way."""
    if value is None:
        return None
    try:
        return {int(line): [bool(mark) for mark in each] for line, each in mapping(value).items()}
    except (TypeError, ValueError):
        raise BadAnswer(f"learned is {shown(value)} instead of marks by conversation") from None


def raw_prompt(value: Any) -> str | tuple[int, ...] | None:
    """A prompt of an EnvAsk. Raises: BadAnswer."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise BadAnswer(f"prompt is {shown(value)} instead of a text or token ids")
    return tuple(value)


def options(value: Any) -> TurnOptions:
    """The options of a turn. Raises: BadAnswer."""
    values = mapping(value)
    stop, seed = values.get("stop") or (), values.get("seed")
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise BadAnswer(f"stop is {shown(stop)} instead of texts")
    if seed is not None and type(seed) is not int:
        raise BadAnswer(f"seed is {shown(seed)} instead of a number")
    temperature = None if values.get("temperature") is None else number(values["temperature"], "temperature")
    if temperature is not None and temperature <= 0:
        raise BadAnswer(f"temperature is {temperature:g} instead of a number above 0")
    return TurnOptions(
        stop=tuple(stop),
        seed=seed,
        draws_as=str(values.get("draws_as") or ""),
        top_logprobs=(count(values, "top_logprobs") or 0) if values.get("top_logprobs") else 0,
        prompt_logprobs=values.get("prompt_logprobs") is True,
        temperature=temperature,
        grammar=str(values.get("grammar") or ""),
        tokens=values.get("tokens") is True,
    )


def metrics_of(values: Any) -> dict[str, float]:
    """Raises: BadAnswer."""
    return {str(name): number(value, f"metric {name}") for name, value in mapping(values).items()}


def mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise BadAnswer(f"{shown(value)} is no mapping")
    return value


def messages(values: Mapping[Any, Any], name: str, kind: type, *, role: bool = True) -> list[Mapping[str, Any]]:
    found = values.get(name)
    if not isinstance(found, (list, tuple)):
        raise BadAnswer(f"{name} is {shown(found)} instead of a list")
    for item in found:
        if not isinstance(item, Mapping) or (role and not isinstance(item.get("role"), str)):
            raise BadAnswer(f"{name} holds {shown(item)}, which is no message with a role")
    return [dict(item) for item in found]


def number(value: Any, name: str) -> float:
    # A number of numpy's or torch's.
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadAnswer(f"{name} is {shown(value)} instead of a finite number")
    return float(value)


def text(values: Mapping[Any, Any], name: str) -> str | None:
    if (found := values.get(name)) is not None and not isinstance(found, str):
        raise BadAnswer(f"{name} is {shown(found)} instead of a text")
    return found


def count(values: Mapping[Any, Any], name: str) -> int | None:
    if (found := values.get(name)) is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
        raise BadAnswer(f"{name} is {shown(found)} instead of a number of tokens")
    return found


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
