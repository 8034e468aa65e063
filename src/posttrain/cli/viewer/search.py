"""Filter and order of the samples shown."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.cli.viewer.sample_file import SampleFile

Row = Mapping[str, Any]
# Names that a condition may use, and the field of a sample that each reads.
NUMBERS = {
    "reward": "reward",
    "advantage": "advantage",
    "tokens": "response_tokens",
    "version": "policy_version",
}
WORDS = {"stop": "stop_reason", "source": "data_source", "prompt": "prompt_id", "id": "sample_id"}
ORDERS = ("file", "reward", "advantage", "tokens")
_CONDITION = re.compile(r"([A-Za-z][\w./-]*)(<=|>=|!=|=|<|>)(.+)")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
HELP = "reward<0.5  advantage>0  tokens>=100  term.NAME=1  stop=length  source=gsm8k  prompt=ID  invalid  any words"


def conditions(text: str) -> list[Callable[[Row], bool]]:
    """Parse a filter: words that a sample must all satisfy, such as ``reward<0.5 stop=length some words``.

    A word that is no condition must occur in the prompt or response, ignoring case.
    Raises: ValueError, with a message for the user, for an unknown name, or a comparison with a text that is not a number.
    """
    return [_condition(word) for word in text.split()]


def _condition(word: str) -> Callable[[Row], bool]:
    match = _CONDITION.fullmatch(word)
    if word == "invalid":
        return lambda row: bool(row.get("invalid"))
    if match is None:
        sought = word.casefold()
        return lambda row: any(sought in str(row.get(name) or "").casefold() for name in ("prompt", "response"))
    name, sign, value = match.groups()
    compare = _COMPARE[sign]
    if name in WORDS:
        if sign not in ("=", "!="):
            raise ValueError(f"{name} is a word: use {name}={value} or {name}!={value}")
        return lambda row: compare(str(row.get(WORDS[name])), value)
    if name not in NUMBERS and not name.startswith("term."):
        raise ValueError(f"there is no {name} to compare; known: {', '.join([*NUMBERS, 'term.NAME', *WORDS])}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value} is no number: {word}") from None

    def holds(row: Row) -> bool:
        found = _number(row, name)
        return found is not None and compare(found, number)

    return holds


def chosen(samples: SampleFile, text: str = "", order: str = "file", *, descending: bool = False) -> Sequence[int]:
    """Return the numbers of the samples that pass the filter, in order; samples without the ordering number come last.

    Raises: ValueError as ``conditions``.
    """
    asked = conditions(text)
    if not asked and order == "file":
        return range(len(samples))[:: -1 if descending else 1]
    found: list[tuple[float | None, int]] = []
    for index in range(len(samples)):
        row = samples.parse(index)
        if all(condition(row) for condition in asked):
            found.append((float(index) if order == "file" else _number(row, order), index))
    ordered = sorted(((key, index) for key, index in found if key is not None), key=lambda pair: pair[0])
    if descending:
        ordered.reverse()
    return [index for _, index in ordered] + [index for key, index in found if key is None]


def _number(row: Row, name: str) -> float | None:
    terms = row.get("reward_terms")
    if name.startswith("term."):
        value = terms.get(name.removeprefix("term.")) if isinstance(terms, Mapping) else None
    else:
        value = row.get(NUMBERS[name])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
