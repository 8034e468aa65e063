"""Numbers written as the Romans did."""

from __future__ import annotations

VALUES = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
LETTERS = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]


def written(number: int) -> str:
    """Write a number from 1 to 3999. Raises: ValueError for any other."""
    if number < 1 or number > 3999:
        raise ValueError("a roman number is 1 to 3999")
    text = ""
    for value, letters in zip(VALUES, LETTERS, strict=True):
        while number >= value:
            text += letters
            number -= value
    return text
