"""Numbers in other bases, and check digits."""

from __future__ import annotations

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def in_base(number: int, base: int) -> str:
    """Write a whole number in a base from 2 to 36. Raises: ValueError for any other base."""
    if base < 2 or base > 36:
        raise ValueError("a base is 2 to 36")
    if number == 0:
        return "0"
    sign, number = ("-" if number < 0 else ""), abs(number)
    written = ""
    while number > 0:
        number, digit = divmod(number, base)
        written = DIGITS[digit] + written
    return sign + written


def luhn(digits: str) -> bool:
    """Return True when the check digit at the end is right: every second digit from the right is doubled, and 9 is taken off
    where that is more than 9; the sum divides by 10."""
    total = 0
    for place, sign in enumerate(reversed(digits)):
        value = int(sign)
        if place % 2 == 1:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return total % 10 == 0


def check_digit(digits: str) -> str:
    """Return the digit that makes luhn true behind these."""
    return next(digit for digit in DIGITS[:10] if luhn(digits + digit))
