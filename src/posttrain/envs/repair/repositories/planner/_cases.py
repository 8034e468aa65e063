"""Calls that test the package."""

from __future__ import annotations

import random
from collections.abc import Iterator


def calls(draws: random.Random) -> Iterator[tuple[str, list[object]]]:
    for _ in range(3):
        names = draws.sample("abcdef", 6)
        before = {
            name: draws.sample(names[:place], min(place, draws.randint(0, 2))) for place, name in enumerate(names)
        }
        hours = {name: draws.randint(1, 5) for name in names}
        yield "order:ordered", [before]
        yield "order:all_before", [before, names[-1]]
        yield "times:ends", [before, hours]
        yield "times:spare", [before, hours]
        yield "times:busy", [before, hours, draws.randint(0, 3)]
    chain = {"a": [], "b": ["a"], "c": ["a", "b"], "d": []}
    time = draws.randint(1, 4)
    hours = {"a": time, "b": 2, "c": 1, "d": time}
    yield "times:spare", [chain, hours]
    yield "times:busy", [chain, hours, time]
    yield "times:busy", [chain, hours, 0]
    yield "order:ordered", [{"a": ["b"], "b": ["a"]}]
    yield "order:ordered", [{"a": ["b"]}]
    yield "order:all_before", [chain, draws.choice(["c", "b"])]
