"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for year in (1900, 2000, draws.randrange(1904, 2096, 4), draws.randrange(1905, 2095, 4)):
        yield "months:is_leap", [year]
        yield "months:days_in_month", [year, 2]
        yield "days:day_of_year", [[year, draws.randint(3, 12), draws.randint(1, 28)]]
        yield "days:weekday", [[year, draws.randint(1, 12), draws.randint(1, 28)]]
    yield "months:days_in_month", [2023, draws.choice([0, 13])]
    yield "months:days_in_month", [2023, draws.choice([1, 12])]
    yield "days:later", [[2023, 12, draws.randint(25, 31)], draws.randint(7, 90)]
    yield "days:later", [[2024, 2, draws.randint(20, 28)], draws.randint(9, 40)]
    yield "days:days_between", [[2023, draws.randint(1, 12), 5], [2025, draws.randint(1, 12), 7]]
    yield "days:days_between", [[2021, 5, draws.randint(5, 9)], [2021, 5, draws.randint(1, 4)]]
