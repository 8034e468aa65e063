"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        text = "".join(letter * draws.randint(1, 12) for letter in draws.sample("abcdef", 3))
        yield "runs:encode", [text]
        yield "runs:decode", [f"{draws.randint(1, 30)}x{draws.randint(1, 9)}y"]
        yield "numbers:in_base", [draws.randint(2, 5000), draws.choice([2, 36, 16, 7])]
        yield "numbers:luhn", ["".join(draws.choices("0123456789", k=7))]
        yield "numbers:check_digit", ["".join(draws.choices("0123456789", k=draws.randint(5, 9)))]
    yield "runs:encode", [""]
    yield "runs:decode", ["ab"]
    yield "runs:decode", [f"3a{draws.randint(1, 9)}"]
    yield "numbers:in_base", [0, draws.randint(2, 9)]
    yield "numbers:in_base", [-draws.randint(1, 99), 3]
    yield "numbers:in_base", [5, draws.choice([1, 37])]
    yield "numbers:in_base", [1, 2]
