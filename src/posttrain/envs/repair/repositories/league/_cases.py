"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator

TEAMS = ["Ash", "Elm", "Fir", "Oak"]


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        games = [[*draws.sample(TEAMS, 2), draws.randint(0, 3), draws.randint(0, 3)] for _ in range(8)]
        yield "table:table", [games]
        yield "table:places", [games]
        yield "table:streak", [games, "Elm"]
        yield "games:goals", [games, "Oak"]
    goals = draws.randint(1, 4)
    yield "games:points", [["Ash", "Elm", goals, goals]]
    yield "games:points", [["Ash", "Elm", goals, 0]]
    yield "games:points", [["Ash", "Elm", 0, goals]]
    yield "table:places", [[["Ash", "Elm", 1, 1], ["Fir", "Oak", 1, 1], ["Ash", "Fir", 0, goals]]]
    yield "table:streak", [[["Ash", "Elm", 1, 1], ["Elm", "Oak", 2, 1], ["Ash", "Elm", goals, 0]], "Elm"]
