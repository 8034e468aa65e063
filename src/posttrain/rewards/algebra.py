"""Answers compared by math-verify, on the way from a response to what it reads."""

from __future__ import annotations

import functools
import re
from typing import Any

from posttrain.libraries import math_verify as library
from posttrain.rewards.spans import last_boxed

# A number, or a fraction of two, in running text.
_PLAIN = re.compile(r"(?<![\w.,])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?(?![\w])")
# What math-verify is given at most, in characters: its patterns are not linear.
_LONGEST = 2000


def same_by_algebra(response: str, reference: str, *, skip_quoted: bool = False) -> bool:
    r"""Whether the answer of a response is the reference: its last \boxed{…}; without one, the last LaTeX formula that
    math-verify finds in the last 2000 characters; without one, the last plain number or fraction.

    Raises: ValueError when the reference is nothing that math-verify understands.
    """
    wanted = _reference(reference)
    answer = _answer(response, skip_quoted)
    return answer is not None and library.same(wanted, answer)


def _answer(response: str, skip_quoted: bool) -> Any | None:
    box = last_boxed(response, skip_quoted=skip_quoted)
    if box is not None:
        return library.parse(f"${box}$") if len(box) <= _LONGEST else None
    tail = response[-_LONGEST:]
    found = library.parse(tail) if "$" in tail or "\\" in tail else None
    if found is not None:
        return found
    numbers = _PLAIN.findall(tail)
    return library.parse(f"${numbers[-1]}$") if numbers else None


@functools.lru_cache(maxsize=1024)  # every response of a group asks for the same one
def _reference(reference: str) -> Any:
    parsed = library.parse(reference) if "$" in reference or "\\boxed" in reference else None
    parsed = parsed if parsed is not None else library.parse(f"${reference}$")
    if parsed is None:
        raise ValueError(f"math-verify does not understand the ground truth {reference!r}")
    return parsed
