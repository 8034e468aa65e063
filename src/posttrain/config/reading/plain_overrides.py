"""Overrides such as ``a.b=1``, ``+a.b=text`` and ``a.b=[x,'y z']``, read as Hydra's grammar reads them, without Hydra: its parser
takes longer to import than a plan takes."""

from __future__ import annotations

import re
from typing import Any, Literal

# Hydra's keys may also name groups and packages, its values hold functions, sweeps and escapes: those are left to it
_OVERRIDE = re.compile(
    r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_]\w*(?:\.(?:[A-Za-z_]\w*|0|[1-9]\d*))*)=(?P<value>.*)", re.ASCII
)
_INT = re.compile(r"[-+]?(?:0|[1-9]\d{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:0|[1-9]\d*)(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)", re.ASCII)
_TEXT = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
_QUOTED = re.compile(r"'([^'\\$]*)'|\"([^\"\\$]*)\"")
_LIST = re.compile(r"\[(.*)\]")
_ITEM = re.compile(r"('[^'\\$]*'|\"[^\"\\$]*\"|[^\s,'\"\[\]{}()]+)(?:,|$)")
_WORDS = {"true": True, "false": False, "null": None}
_NUMBERS = ("nan", "inf")  # words that are numbers there
_ACTIONS: dict[str, Literal["set", "add", "force"]] = {"": "set", "+": "add", "++": "force"}


class NotPlain(ValueError):
    """A value that only Hydra reads."""


def plain_override(text: str) -> tuple[str, Literal["set", "add", "force"], Any] | None:
    """Read an override. Returns: its dotted key, what it does, and its value; None for one that Hydra must read or refuse."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        return None
    try:
        return match["key"], _ACTIONS[match["plus"]], _value(match["value"])
    except NotPlain:
        return None


def _value(text: str) -> Any:
    if match := _LIST.fullmatch(text):
        return _items(match[1])
    return _scalar(text) if text else ""


def _items(text: str) -> list[Any]:
    found, place = [], 0
    while place < len(text):
        item = _ITEM.match(text, place)
        if item is None:
            raise NotPlain
        found.append(_scalar(item[1]))
        place = item.end()
    if text.endswith(","):
        raise NotPlain
    return found


def _scalar(text: str) -> Any:
    if match := _QUOTED.fullmatch(text):
        return match[1] if match[1] is not None else match[2]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if _TEXT.fullmatch(text) and lower not in _NUMBERS:
        return text
    raise NotPlain
