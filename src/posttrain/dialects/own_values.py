"""Options of the user's own: values that a fork's code has for a key of its peer's, and no version of the peer.

The code behind such an option is not called. It is left out where ``posttrain.own_keys`` names the key, and the peer's default
stands in its place: a loss mode or an aggregation of a fork becomes the plain one, by its user's word.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.config.reading.validate import show
from posttrain.dialects.ledger import ABSENT, Key
from posttrain.dialects.own_keys import OWN_KEYS, is_named
from posttrain.dialects.reader import Reader
from posttrain.dialects.value_types import choices, fits

_CODE = "verl"  # the package of a fork's checkout in the current folder


def left_out(reader: Reader, row: Key, key: str, value: Any) -> bool:
    """Put the peer's default in the place of an option of the user's own whose key is named. Returns: True if it did."""
    source = _taken_from(reader, row)
    if source is not None and is_named(source.name, reader.own_keys) and _place(reader, value) is not None:
        reader.put(key, _default(source))
        return True
    if not _has_plain_default(row) or not is_left_out(reader, key, value, _default(row)):
        return False
    reader.put(key, _default(row))
    return True


def way_on(reader: Reader, row: Key, key: str, value: Any) -> str:
    """The fix for an option that the checkout's own code has; "" for another."""
    source = _taken_from(reader, row)
    at, name = (row, key) if source is None else (source, source.name)
    return way_on_without(reader, name, value, _default(at)) if _has_plain_default(at) else ""


def is_left_out(reader: Reader, key: str, value: Any, default: Any) -> bool:
    """Return True, with a warning, for an option of the checkout's own whose key is named: ``default`` stands in its place."""
    place = _place(reader, value)
    if place is None or not is_named(key, reader.own_keys):
        return False
    reader.warn(
        f"{key}={value} is an option of the checkout's own ({place}), which is not called: {_shown(reader, default)} stands in "
        f"its place (named in {OWN_KEYS})"
    )
    reader.left_out.add(key)
    return True


def way_on_without(reader: Reader, key: str, value: Any, default: Any) -> str:
    """The fix for an option that the checkout's own code has, and that ``default`` may stand in for; "" for another."""
    place = _place(reader, value)
    if place is None:
        return ""
    return (
        f"it is an option of the checkout's own ({place}), which is not called: write one of {reader.ledger.dialect}'s, or "
        f"confirm by name that {_shown(reader, default)} is meant: +{OWN_KEYS}=[{key}]"
    )


def _has_plain_default(row: Key) -> bool:
    """Return True for a key of named options whose default may stand in for another. Another estimator is another algorithm, with
    or without a critic, which its user has to choose."""
    return bool(choices(row.type)) and fits(_default(row), row.type) and "advantage.name" not in row.fields


def _taken_from(reader: Reader, row: Key) -> Key | None:
    """Return the row of the key whose value is the default of another, ``${actor_rollout_ref.actor.loss_agg_mode}``."""
    named = re.fullmatch(r"\$\{([\w.]+)\}", row.default) if isinstance(row.default, str) else None
    return reader.ledger.find(named[1]) if named else None


def _default(row: Key) -> Any:
    return None if row.default is ABSENT else row.default


def _shown(reader: Reader, default: Any) -> str:
    return f"{reader.ledger.dialect}'s default" + ("" if default is None else f" {show(default)}")


def _place(reader: Reader, value: Any) -> str | None:
    """The line of the checkout's code that holds an option; None without one."""
    if reader.ledger.dialect != "verl" or not isinstance(value, str) or len(value) < 4:
        return None
    return _written(value, str(Path.cwd()))


@lru_cache(maxsize=64)
def _written(value: str, folder: str) -> str | None:
    """Return the first line, as FILE:LINE, of a checkout's code that compares something with a text, or registers it."""
    text = rf"""["']{re.escape(value)}["']"""
    pattern = re.compile(rf"==\s*{text}|{text}\s*:|in\s*[\[({{][^\])}}\n]*{text}|register\(\s*{text}")
    for file in sorted((Path(folder) / _CODE).rglob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        if value in source and (found := pattern.search(source)) is not None:
            return f"{file.relative_to(folder)}:{source.count(chr(10), 0, found.start()) + 1}"
    return None
