"""Ways through a map."""

from __future__ import annotations

from .squares import neighbours


def distance(rows: list[str], start: list[int], goal: list[int]) -> int:
    """Count the steps of the shortest way; -1 where there is none."""
    far = {tuple(start): 0}
    waiting = [start]
    while waiting:
        here = waiting.pop(0)
        if here == goal:
            return far[tuple(here)]
        for there in neighbours(rows, here[0], here[1]):
            if tuple(there) not in far:
                far[tuple(there)] = far[tuple(here)] + 1
                waiting.append(there)
    return -1


def rooms(rows: list[str]) -> list[int]:
    """Return the sizes of all connected open areas, the largest first."""
    seen: set[tuple[int, int]] = set()
    sizes = []
    for row in range(len(rows)):
        for column in range(len(rows[0])):
            if rows[row][column] == "#" or (row, column) in seen:
                continue
            seen.add((row, column))
            waiting, size = [[row, column]], 0
            while waiting:
                here = waiting.pop()
                size += 1
                for there in neighbours(rows, here[0], here[1]):
                    if (there[0], there[1]) not in seen:
                        seen.add((there[0], there[1]))
                        waiting.append(there)
            sizes.append(size)
    return sorted(sizes, reverse=True)
