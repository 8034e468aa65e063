"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator

WORDS = ["a", "to", "sea", "moon", "river", "stones", "harbour", "mountain"]


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        words = draws.choices(WORDS, k=12)
        yield "page:page", [" ".join(words), draws.randint(14, 22)]
        yield "wrapping:wrap", [" ".join(words), len(words[0]) + 1 + len(words[1])]
        some = draws.sample(WORDS[:6], 4)
        yield "wrapping:justify", [some, sum(map(len, some)) + draws.choice([4, 5, 7])]
        yield "page:columns", [[draws.choices(WORDS, k=3) for _ in range(3)]]
    yield "wrapping:wrap", ["harbour mountain", 4]
    yield "wrapping:wrap", ["", draws.randint(1, 9)]
    yield "wrapping:wrap", ["a sea", 0]
    yield "wrapping:wrap", ["a a", 1]
    word = draws.choice(WORDS[4:])
    yield "wrapping:justify", [[word], len(word) + 2]
    yield "page:shortened", [word, len(word)]
    yield "page:shortened", [word + word, len(word)]
