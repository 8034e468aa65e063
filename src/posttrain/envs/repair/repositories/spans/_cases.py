"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(4):
        one, other = _drawn(draws), _drawn(draws)
        yield "union:merged", [[*one, [one[0][1], one[0][1] + 2], [40, 40]]]
        yield "union:covered", [one]
        yield "cuts:gaps", [one, draws.randint(3, 9), draws.randint(18, 28)]
        yield "cuts:common", [one, other]
        yield "cuts:most_at_once", [[*one, [one[0][1], one[0][1] + 2]]]
    yield "cuts:gaps", [[[2, 5], [5, 9]], 0, draws.randint(10, 12)]
    yield "cuts:most_at_once", [[[0, draws.randint(3, 5)], [1, 6], [2, 9]]]


def _drawn(draws: random.Random) -> list[list[int]]:
    firsts = [draws.randrange(30) for _ in range(4)]
    return [[first, first + draws.randint(1, 7)] for first in firsts]
