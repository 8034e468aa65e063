"""Comparison of answers by computer algebra (math-verify), from the whole response to the verdict."""

from __future__ import annotations

import functools
import re
from typing import Any

from posttrain.libraries import math_verify as library
from posttrain.rewards.spans import last_boxed

# Pattern of a number, or of a fraction of two numbers, in running text.
_PLAIN = re.compile(r"(?<![\w.,])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?(?![\w])")
# Longest text in characters that is passed to math-verify, whose patterns are not linear.
_LONGEST = 2000


def same_by_algebra(response: str, reference: str, *, skip_quoted: bool = False) -> bool:
    r"""Return True when the answer of a response equals the reference. The answer is the last \boxed{…}; without one, the
    last LaTeX formula that math-verify finds in the last 2000 characters; without one, the last plain number or fraction.

    Raises: ValueError when math-verify cannot parse the reference.
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
