"""Dates as [year, month, day]."""

from __future__ import annotations

from .months import days_in_month, is_leap

NAMES = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def day_of_year(date: list[int]) -> int:
    """Number the day in its year, from 1."""
    year, month, day = date
    return sum(days_in_month(year, before) for before in range(1, month)) + day


def days_between(first: list[int], second: list[int]) -> int:
    """Count the days from one date to another; negative when the second is earlier."""
    return _number(second) - _number(first)


def later(date: list[int], days: int) -> list[int]:
    """Return the date so many days later, 0 or more."""
    year, month, day = date
    for _ in range(days):
        day += 1
        if day > days_in_month(year, month):
            day, month = 1, month + 1
        if month > 12:
            month, year = 1, year + 1
    return [year, month, day]


def weekday(date: list[int]) -> str:
    """Name the weekday."""
    return NAMES[(_number(date) - 1) % 7]


def _number(date: list[int]) -> int:
    """Number a day from the first of the year 1, a Monday."""
    year = date[0]
    leap_years = sum(1 for before in range(1, year) if is_leap(before))
    return (year - 1) * 365 + leap_years + day_of_year(date)
