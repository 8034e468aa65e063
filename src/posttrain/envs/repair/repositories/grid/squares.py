"""Squares of a map and those beside them."""

from __future__ import annotations

STEPS = [(-1, 0), (0, -1), (0, 1), (1, 0)]


def inside(rows: list[str], row: int, column: int) -> bool:
    """Return True for a square of the map."""
    return 0 <= row < len(rows) and 0 <= column < len(rows[0])


def neighbours(rows: list[str], row: int, column: int) -> list[list[int]]:
    """List the open squares beside a square: above, left, right, below."""
    found = []
    for down, right in STEPS:
        if inside(rows, row + down, column + right) and rows[row + down][column + right] != "#":
            found.append([row + down, column + right])
    return found


def count(rows: list[str], sign: str) -> int:
    """Count a sign on the map."""
    return sum(line.count(sign) for line in rows)
