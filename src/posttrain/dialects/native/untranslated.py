"""The part of a translation that native words cannot say: listed in the file, which does not train while it stands there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.config.reading.compose import Composed
from posttrain.errors import Problem

SECTION = "untranslated"


def entries(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """The section's value, from what the peer's configuration asks for and a run would refuse."""
    return [{"key": problem.field, "reason": problem.what} for problem in problems]


def take_out(composed: Composed) -> tuple[list[Problem], list[Problem]]:
    """Remove the section from the values. Returns: what keeps the file from training, and what is wrong with the section."""
    listed = composed.values.pop(SECTION, None)
    if listed is None:
        return [], []
    if not isinstance(listed, list) or not all(_is_entry(entry) for entry in listed):
        what = f"{SECTION} must be a list of {{key: ..., reason: ...}}"
        return [], [Problem(what, where=composed.sources.where(SECTION), field=SECTION)]
    return [
        Problem(
            f"not translated: {entry['reason']}",
            fix="say it in native keys or do without it, and remove the entry",
            where=composed.sources.where(f"{SECTION}.{number}.key"),
            field=f"{SECTION}.{number}",
        )
        for number, entry in enumerate(listed)
    ], []


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"key", "reason"} and all(map(str, value.values()))
