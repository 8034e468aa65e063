"""A call about many responses that fails is made again about halves, until only what fails alone is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from posttrain.processes.limits import TIMEOUT
from posttrain.records.trajectories import Invalid

T = TypeVar("T")


def ask_in_halves(
    count: int, ask: Callable[[Sequence[range]], Sequence[Sequence[T] | Invalid]], *, halve: bool
) -> list[T | Invalid]:
    """An answer for each of ``count`` responses.

    Args: ``ask`` makes a call about each of the ranges and gives, per range, its answers or why the call failed; ``halve``
        False leaves it at the first call.

    With one culprit among n this takes 2 log2(n) further calls, half of which fail. Calls that run out of time are dear: after
    4 + 2 log2(n) of them (a function that always hangs), and after n failed calls of any kind, what has failed stays so.
    """
    found: dict[int, T | Invalid] = {}
    open_ranges, failed, late = [range(count)] if count else [], 0, 0
    while open_ranges:
        halves: list[range] = []
        for places, answers in zip(open_ranges, ask(open_ranges), strict=True):
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
