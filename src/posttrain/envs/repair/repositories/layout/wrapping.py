"""Breaking text into lines."""

from __future__ import annotations


def wrap(text: str, width: int) -> list[str]:
    """Break a text at spaces into lines of at most width characters; a longer word has a line of its own.

    Raises: ValueError for a width below 1.
    """
    if width < 1:
        raise ValueError("a line has at least one character")
    lines: list[str] = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line = f"{line} {word}"
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def justify(words: list[str], width: int) -> str:
    """Set words into one line of exactly width characters; wider gaps come first. A single word is padded at its end."""
    if len(words) == 1:
        return words[0].ljust(width)
    gaps = len(words) - 1
    spaces = width - sum(len(word) for word in words)
    each, more = divmod(spaces, gaps)
    line = ""
    for number, word in enumerate(words):
        line += word
        if number < gaps:
            line += " " * (each + (1 if number < more else 0))
    return line
