"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        rows = ["".join(draws.choices(".#", (2, 1), k=5)) for _ in range(4)]
        yield "ways:rooms", [rows]
        open_ = [[row, column] for row in range(4) for column in range(5) if rows[row][column] == "."] or [[0, 0]]
        yield "ways:distance", [rows, open_[0], open_[-1]]
        yield "squares:neighbours", [rows, draws.randrange(4), draws.randrange(5)]
        yield "squares:count", [rows, "#"]
    wide = ["....." for _ in range(3)]
    yield "ways:distance", [wide, [0, 0], [2, draws.randint(1, 4)]]
    yield "squares:neighbours", [wide, 0, 0]
    yield "squares:neighbours", [wide, 2, 4]
    yield "squares:inside", [wide, 3, draws.randrange(5)]
    yield "squares:inside", [wide, draws.randrange(3), 5]
    yield "squares:inside", [wide, draws.randrange(3), -1]
