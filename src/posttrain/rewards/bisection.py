"""Bisection of failed calls: a failed call about many responses is repeated on halves, until single responses fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from posttrain.processes.limits import TIMEOUT
from posttrain.records.trajectories import Invalid

T = TypeVar("T")


def call_with_bisection(
    count: int, call: Callable[[Sequence[range]], Sequence[Sequence[T] | Invalid]], *, halve: bool
) -> list[T | Invalid]:
    """Return an answer for each of ``count`` responses.

    Args: ``call`` is given ranges of responses and returns, per range, its answers or the reason why the call failed; with
        ``halve`` False a failed call is not repeated.

    With one failing response among n this takes 2 log2(n) further calls, half of which fail. Calls that time out are
    expensive: after 4 + 2 log2(n) timeouts (a function that always hangs), and after n failed calls of any kind, the
    remaining failures are final.
    """
    found: dict[int, T | Invalid] = {}
    open_ranges, failed, late = [range(count)] if count else [], 0, 0
    while open_ranges:
        halves: list[range] = []
        for places, answers in zip(open_ranges, call(open_ranges), strict=True):
            if not isinstance(answers, Invalid):
                found |= zip(places, answers, strict=True)
                continue
            failed, late = failed + 1, late + (answers.reason == TIMEOUT)
            if halve and len(places) > 1 and failed <= count and late <= 4 + 2 * count.bit_length():
                middle = len(places) // 2
                halves += [places[:middle], places[middle:]]
            else:
                found |= dict.fromkeys(places, answers)
        open_ranges = halves
    return [found[place] for place in range(count)]
