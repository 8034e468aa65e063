"""Formulas cut into numbers and signs."""

from __future__ import annotations

SIGNS = "+-*/()"


def pieces(text: str) -> list[str]:
    """Cut "3*(4+15)" into its numbers and signs, without spaces. Raises: ValueError for any other character."""
    found: list[str] = []
    number = ""
    for sign in text:
        if sign.isdigit():
            number += sign
            continue
        if number:
            found.append(number)
            number = ""
        if sign in SIGNS:
            found.append(sign)
        elif sign != " ":
            raise ValueError(f"{sign} is no part of a formula")
    if number:
        found.append(number)
    return found
