"""Turning and cutting tables."""

from __future__ import annotations


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Swap rows and columns."""
    return [[row[place] for row in rows] for place in range(len(rows[0]))]


def turned(rows: list[list[int]], times: int) -> list[list[int]]:
    """Turn a table clockwise by so many quarters; negative numbers turn it back."""
    for _ in range(times % 4):
        rows = [list(reversed(column)) for column in transposed(rows)]
    return rows


def spiral(rows: list[list[int]]) -> list[int]:
    """Read a table from its top left corner clockwise inwards."""
    found: list[int] = []
    while rows and rows[0]:
        found += rows[0]
        rows = turned(rows[1:], 3) if len(rows) > 1 else []
    return found
