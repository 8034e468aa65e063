"""Parts of spans."""

from __future__ import annotations

from .union import merged


def gaps(spans: list[list[int]], first: int, end: int) -> list[list[int]]:
    """Return the parts of [first, end] that no span covers."""
    found, place = [], first
    for begin, stop in merged(spans):
        if stop <= first or begin >= end:
            continue
        if begin > place:
            found.append([place, begin])
        place = max(place, stop)
    if place < end:
        found.append([place, end])
    return found


def common(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    """Return the parts that both lists of spans cover."""
    found = []
    for first, end in merged(one):
        for begin, stop in merged(other):
            if max(first, begin) < min(end, stop):
                found.append([max(first, begin), min(end, stop)])
    return found


def most_at_once(spans: list[list[int]]) -> int:
    """Return the largest number of spans that hold the same number."""
    changes = sorted([(end, -1) for _, end in spans] + [(first, 1) for first, _ in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
