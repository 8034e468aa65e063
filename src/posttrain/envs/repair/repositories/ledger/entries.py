"""Entries of a ledger: date, account and amount in cents."""

from __future__ import annotations

Entry = tuple[str, str, int]


def parse(line: str) -> Entry:
    """Read "2024-05-01 rent -800.00" as an entry. Raises: ValueError for a line without three parts or with an odd amount."""
    parts = line.split()
    if len(parts) != 3:
        raise ValueError("a line has a date, an account and an amount")
    day, account, amount = parts
    return day, account, cents(amount)


def cents(amount: str) -> int:
    """Read an amount such as -12.50, with two digits or none behind the point. Raises: ValueError."""
    sign = -1 if amount.startswith("-") else 1
    whole, point, rest = amount.lstrip("+-").partition(".")
    if point and len(rest) != 2:
        raise ValueError("an amount has two digits behind the point")
    return sign * (int(whole) * 100 + int(rest or "0"))


def shown(amount: int) -> str:
    """Write cents as an amount."""
    sign = "-" if amount < 0 else ""
    return f"{sign}{abs(amount) // 100}.{abs(amount) % 100:02d}"
