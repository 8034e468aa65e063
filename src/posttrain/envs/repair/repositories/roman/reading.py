"""Roman numbers read, and calculated with."""

from __future__ import annotations

from .writing import written

WORTH = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def value(text: str) -> int:
    """Read a roman number. Raises: ValueError for a text that is not written as a number is."""
    total = 0
    for place, letter in enumerate(text):
        if letter not in WORTH:
            raise ValueError(f"{letter} is no roman digit")
        worth = WORTH[letter]
        if place + 1 < len(text) and WORTH.get(text[place + 1], 0) > worth:
            total -= worth
        else:
            total += worth
    if total < 1 or written(total) != text:
        raise ValueError("this is no roman number")
    return total


def added(one: str, other: str) -> str:
    """Add two roman numbers."""
    return written(value(one) + value(other))


def ordered(texts: list[str]) -> list[str]:
    """Sort roman numbers by value, the largest first."""
    return sorted(texts, key=value, reverse=True)


def longest(first: int, last: int) -> int:
    """Return the number from first to last, both included, that is the longest in roman; of several the smallest."""
    found = first
    for number in range(first, last + 1):
        if len(written(number)) > len(written(found)):
            found = number
    return found
