"""The value of a formula."""

from __future__ import annotations

from .reading import pieces

RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


def ordered(text: str) -> list[str]:
    """Write a formula with every sign behind the two that it joins: 2+3*4 is 2 3 4 * +. Equal ranks go from left to right.

    Raises: ValueError for brackets that do not fit.
    """
    written: list[str] = []
    waiting: list[str] = []
    for piece in pieces(text):
        if piece.isdigit():
            written.append(piece)
        elif piece == "(":
            waiting.append(piece)
        elif piece == ")":
            while waiting and waiting[-1] != "(":
                written.append(waiting.pop())
            if not waiting:
                raise ValueError("a bracket is closed that was not opened")
            waiting.pop()
        else:
            while waiting and waiting[-1] != "(" and RANK[waiting[-1]] >= RANK[piece]:
                written.append(waiting.pop())
            waiting.append(piece)
    if "(" in waiting:
        raise ValueError("a bracket is not closed")
    return written + waiting[::-1]


def value(text: str) -> int:
    """Calculate a formula; a division rounds down."""
    stack: list[int] = []
    for piece in ordered(text):
        if piece.isdigit():
            stack.append(int(piece))
            continue
        right, left = stack.pop(), stack.pop()
        if piece == "+":
            stack.append(left + right)
        elif piece == "-":
            stack.append(left - right)
        elif piece == "*":
            stack.append(left * right)
        else:
            stack.append(left // right)
    return stack[0]
