"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(2):
        lines = [_line(draws) for _ in range(8)]
        yield "statements:balances", [lines + ["2024-01-05 gifts 5.00", "2024-01-06 gifts -5.00"]]
        days = sorted(line.split()[0] for line in lines if " rent " in line) or ["2024-01-01"]
        yield "statements:statement", [lines, "rent", days[0], days[-1]]
        yield "statements:statement", [lines, "rent", days[-1], "2024-12-31"]
        yield "statements:lowest", [lines, "food"]
    yield "entries:cents", [f"-{draws.randint(0, 99)}.{draws.randint(0, 99):02d}"]
    yield "entries:cents", [str(draws.randint(0, 999))]
    yield "entries:cents", ["1.5"]
    yield "entries:parse", ["2024-01-01 rent"]
    yield "entries:shown", [draws.randint(-99, -1)]
    yield "entries:shown", [draws.randint(100, 99999)]


def _line(draws: random.Random) -> str:
    amount = draws.randint(-90000, 50000) / 100
    return f"2024-{draws.randint(1, 12):02d}-{draws.randint(1, 28):02d} {draws.choice(['rent', 'food', 'rent'])} {amount:.2f}"
