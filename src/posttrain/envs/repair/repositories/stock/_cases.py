"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator

NAMES = ["bolt", "nail", "nut", "screw"]


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        shelves = {name: draws.randint(5, 20) for name in NAMES}
        wanted = {name: draws.randint(1, 30) for name in draws.sample(NAMES, 3)} | {"washer": draws.randint(1, 9)}
        each = {name: draws.randint(3, 99) for name in [*NAMES, "washer"]}
        yield "shelves:reserve", [shelves, {"nut": shelves["nut"], "bolt": draws.randint(1, 4)}]
        yield "shelves:missing", [shelves, {**wanted, "nut": shelves["nut"]}]
        yield "prices:price", [{"nut": draws.randint(1, 9), "bolt": 10, "nail": draws.randint(11, 30)}, each]
        yield "prices:purchase", [shelves, wanted, each]
    yield "shelves:reserve", [shelves, {"nut": shelves["nut"] + 1}]
    yield "shelves:reserve", [shelves, {"hinge": 1}]
    yield "prices:delivery", [10000, draws.randint(1, 9)]
    yield "prices:delivery", [draws.randint(100, 9999), draws.randint(6, 30)]
    yield "prices:delivery", [draws.randint(100, 9999), draws.randint(1, 5)]
