"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(4):
        a, b, c, d = (draws.randint(2, 40) for _ in range(4))
        yield "value:value", [f"{a} - {b} - {c}"]
        yield "value:value", [f"{a}+{b}*{c}-{d}"]
        yield "value:value", [f"({a}+{b})*({c} - {d})"]
        yield "value:value", [f"{a * b}/{b}/{2}"]
        yield "value:ordered", [f"{a}*{b}+{c}"]
        yield "reading:pieces", [f"  {a}+({b} /{c})"]
    yield "value:ordered", [f"({draws.randint(1, 9)}+2"]
    yield "value:ordered", [f"{draws.randint(1, 9)}+2)"]
    yield "reading:pieces", [f"{draws.randint(1, 9)}%2"]
    yield "value:value", [str(draws.randint(1, 999))]
