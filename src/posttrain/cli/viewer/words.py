"""Text that anybody may have written, made fit to be looked at, and two such texts compared."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

MAX_CHARS = 200_000  # of one text that are shown
MAX_COMPARED_WORDS = 1_500  # of each of two texts; the time grows with the square
MAX_LINE = 2_000  # characters of one line that are shown as one; a longer line is broken


def visible(text: str) -> str:
    """The text with everything that would move a cursor, colour a terminal, or turn the order of what follows shown as a
    sign or a number instead. Line ends stay; tabs become spaces."""
    return "".join(
        character
        if character == "\n" or (character.isprintable() and not unicodedata.combining(character))
        else _sign(character)
        for character in text.replace("\r\n", "\n")
    )


def _sign(character: str) -> str:
    code = ord(character)
    if character == "\t":
        return "    "
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of the control character
    if unicodedata.combining(character) or unicodedata.category(character) == "Zs":
        return character if code != 0x3000 else "  "
    return f"<U+{code:04X}>"


def shown(text: str) -> str:
    """A whole text for a screen: ``visible``, long lines broken, the rest beyond MAX_CHARS left out and told."""
    lines = [
        line[start : start + MAX_LINE]
        for line in visible(text[:MAX_CHARS]).split("\n")
        for start in range(0, max(len(line), 1), MAX_LINE)
    ]
    left_out = f"\n[{len(text) - MAX_CHARS:,} more characters in the file]" if len(text) > MAX_CHARS else ""
    return "\n".join(lines) + left_out


def one_line(text: str, width: int) -> str:
    """The beginning of a text on one line, at most ``width`` characters."""
    return visible(" ".join(text[: 4 * width].split()))[:width]


def word_diff(before: str, after: str) -> Iterator[tuple[Literal["same", "gone", "new"], str]]:
    """Pieces of both texts, word by word; those that are gone come before what has taken their place. Only the first
    MAX_COMPARED_WORDS words of each are compared, and a last piece says so."""
    one, other = (re.findall(r"\S+\s*|\s+", text[:MAX_CHARS]) for text in (before, after))
    cut = max(len(one), len(other)) > MAX_COMPARED_WORDS
    one, other = one[:MAX_COMPARED_WORDS], other[:MAX_COMPARED_WORDS]
    # Words are compared without the space behind them, so that a longer text keeps the last word of the shorter one.
    keys = [word.strip() for word in one], [word.strip() for word in other]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for kind, start, end, start_after, end_after in matcher.get_opcodes():
        if kind == "equal":
            yield "same", "".join(other[start_after:end_after])
        else:
            if end > start:
                yield "gone", "".join(one[start:end])
            if end_after > start_after:
                yield "new", "".join(other[start_after:end_after])
    if cut:
        yield "same", f"\n[only the first {MAX_COMPARED_WORDS:,} words are compared]"
