"""Comparison of answers by computer algebra (math-verify), from the whole response to the verdict."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from posttrain.libraries import math_verify as library
from posttrain.rewards.digit_groups import joined
from posttrain.rewards.spans import last_boxed

REWARDS_BY_ALGEBRA = frozenset({"math_rule", "math_verify"})
_SIGN = r"(?:\\?%|\\text\{\s*(?:\\?%|per ?cent)\s*\}|per ?cent\b)"
# A per cent sign, or the word, behind a number or a closing brace.
_PERCENT = re.compile(rf"(?<=[0-9.)}}])(?:\s|\\[,;:! ]|~)*{_SIGN}", re.IGNORECASE)
# Pattern of a number, or of a fraction of two numbers, in running text.
_PLAIN = re.compile(
    rf"(?<![\w.,])-?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?(?![\w])(?: ?{_SIGN})?",
    re.IGNORECASE,
)
# Longest text in characters that is passed to math-verify, whose patterns are not linear.
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A parsed answer: ``value`` counts 50 % as 1/2, ``number`` as 50."""

    value: Any
    number: Any

    @property
    def percent(self) -> bool:
        return bool(self.value != self.number)


def same_by_algebra(response: str, reference: str, *, skip_quoted: bool = False) -> bool:
    r"""Return True when the answer of a response equals the reference. The answer is the last \boxed{…}; without one, the
    last LaTeX formula that math-verify finds in the last 2000 characters; without one, the last plain number or fraction.

    Digits in groups of three are one number, whatever blank separates the groups. 50 % equals 1/2; where only one of the two
    has the sign it equals 50 as well.

    Raises: ValueError when math-verify cannot parse the reference.
    """
    wanted = _reference(reference)
    answer = _answer(response, skip_quoted)
    if answer is None:
        return False
    if library.same(wanted.value, answer.value):
        return True
    return wanted.percent != answer.percent and library.same(wanted.number, answer.number)


def _answer(response: str, skip_quoted: bool) -> _Parsed | None:
    box = last_boxed(response, skip_quoted=skip_quoted)
    if box is not None:
        return _parse(f"${box}$") if len(box) <= _LONGEST else None
    tail = response[-_LONGEST:]
    found = _parse(tail) if "$" in tail or "\\" in tail else None
    if found is not None:
        return found
    numbers = _PLAIN.findall(joined(tail))
    return _parse(f"${numbers[-1]}$") if numbers else None


@functools.lru_cache(maxsize=1024)  # every response of a group asks for the same one
def _reference(reference: str) -> _Parsed:
    parsed = _parse(reference) if "$" in reference or "\\boxed" in reference else None
    parsed = parsed if parsed is not None else _parse(f"${reference}$")
    if parsed is None:
        raise ValueError(f"math-verify does not understand the ground truth {reference!r}")
    return parsed


def _parse(text: str) -> _Parsed | None:
    text = joined(text)
    value = library.parse(_PERCENT.sub(r"\\cdot\\frac{1}{100}", text))
    if value is None or not _PERCENT.search(text):
        return None if value is None else _Parsed(value, value)
    return _Parsed(value, library.parse(_PERCENT.sub("", text)))
