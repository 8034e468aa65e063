"""Calculating with tables."""

from __future__ import annotations

from .shapes import transposed


def product(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    """Multiply two tables. Raises: ValueError when the first's width is not the other's height."""
    if len(one[0]) != len(other):
        raise ValueError("the width of the first must be the height of the second")
    columns = transposed(other)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in one]


def power(rows: list[list[int]], times: int) -> list[list[int]]:
    """Multiply a square table with itself; 0 times is the table with ones from corner to corner."""
    size = len(rows)
    found = [[1 if row == column else 0 for column in range(size)] for row in range(size)]
    for _ in range(times):
        found = product(found, rows)
    return found


def is_magic(rows: list[list[int]]) -> bool:
    """Return True when all rows, columns and both diagonals have the same sum."""
    size = len(rows)
    sums = [sum(row) for row in rows] + [sum(column) for column in transposed(rows)]
    sums.append(sum(rows[place][place] for place in range(size)))
    sums.append(sum(rows[place][size - 1 - place] for place in range(size)))
    return all(each == sums[0] for each in sums)
