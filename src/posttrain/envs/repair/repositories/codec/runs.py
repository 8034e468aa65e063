"""Run-length code: aaab is 3a1b."""

from __future__ import annotations


def encode(text: str) -> str:
    """Write every run of a letter as its length and the letter."""
    coded, place = "", 0
    while place < len(text):
        end = place
        while end < len(text) and text[end] == text[place]:
            end += 1
        coded += f"{end - place}{text[place]}"
        place = end
    return coded


def decode(coded: str) -> str:
    """Undo encode. Raises: ValueError for a letter without a number, or a number without a letter."""
    text, number = "", ""
    for sign in coded:
        if sign.isdigit():
            number += sign
        elif not number:
            raise ValueError("a letter has no number")
        else:
            text += sign * int(number)
            number = ""
    if number:
        raise ValueError("a number has no letter")
    return text
