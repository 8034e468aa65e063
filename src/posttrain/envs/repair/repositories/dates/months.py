"""Years and months."""

from __future__ import annotations

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year: int) -> bool:
    """Return True for a leap year of the Gregorian calendar."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year: int, month: int) -> int:
    """Count the days of a month, 1 to 12. Raises: ValueError for any other."""
    if month < 1 or month > 12:
        raise ValueError("a month is 1 to 12")
    return LENGTHS[month - 1] + (1 if month == 2 and is_leap(year) else 0)
