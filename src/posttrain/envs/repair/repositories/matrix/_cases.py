"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        wide = _drawn(draws, 2, 3)
        yield "shapes:transposed", [wide]
        yield "shapes:turned", [wide, draws.choice([1, 3])]
        yield "shapes:turned", [wide, draws.choice([-1, 2, 5])]
        yield "shapes:spiral", [_drawn(draws, draws.randint(3, 4), 3)]
        yield "sums:product", [wide, _drawn(draws, 3, 2)]
        yield "sums:power", [_drawn(draws, 2, 2), draws.choice([0, 2, 3])]
    yield "sums:product", [wide, wide]
    more = draws.randint(0, 5)
    magic = [[each + more for each in row] for row in [[2, 7, 6], [9, 5, 1], [4, 3, 8]]]
    yield "sums:is_magic", [magic]
    yield "sums:is_magic", [[magic[1], magic[0], magic[2]]]
    yield "sums:is_magic", [[[1, 2], [2, 1]]]
    yield "sums:power", [_drawn(draws, 2, 2), 0]


def _drawn(draws: random.Random, height: int, width: int) -> list[list[int]]:
    return [[draws.randint(-9, 9) for _ in range(width)] for _ in range(height)]
