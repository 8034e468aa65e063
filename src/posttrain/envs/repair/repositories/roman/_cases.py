"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator

SOME = ["III", "IX", "XLIV", "XC", "CDXII", "DCCC", "MCMXCIV", "XIX", "LXVI"]


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        yield "writing:written", [draws.randint(1000, 3999)]
        yield "writing:written", [draws.randint(1, 60)]
        yield "reading:value", [draws.choice(SOME)]
        yield "reading:added", [draws.choice(SOME), draws.choice(SOME)]
        yield "reading:ordered", [draws.sample(SOME, 4)]
        first = draws.randint(1, 50)
        yield "reading:longest", [first, first + draws.randint(5, 40)]
    yield "writing:written", [draws.choice([0, 4000])]
    yield "writing:written", [draws.choice([1, 3999])]
    yield "reading:value", [draws.choice(["IIII", "VX", "IC", "XIIX", ""])]
    yield "reading:value", [draws.choice(["XQ", "12", "x"])]
    yield "reading:longest", [8, 8]
    yield "reading:longest", [1, draws.choice([3, 8])]
