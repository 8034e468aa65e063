"""Untrusted text made safe to display, and the difference of two texts."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

MAX_CHARS = 200_000  # longest text that is shown in full
MAX_COMPARED_WORDS = 1_500  # per text; the time grows with the square
MAX_LINE = 2_000  # longest line; longer ones are broken


def visible(text: str) -> str:
    """Replace everything that would move a cursor, colour a terminal, or change the direction of text by a visible sign or a
    number. Line ends stay; tabs become spaces."""
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
        return chr(0x2400 + code)  # the picture of a control character
    if unicodedata.combining(character) or unicodedata.category(character) == "Zs":
        return character if code != 0x3000 else "  "
    return f"<U+{code:04X}>"


def shown(text: str) -> str:
    """Prepare a whole text for a screen: ``visible``, long lines broken, text beyond MAX_CHARS replaced by a note."""
    lines = [
        line[start : start + MAX_LINE]
        for line in visible(text[:MAX_CHARS]).split("\n")
        for start in range(0, max(len(line), 1), MAX_LINE)
    ]
    left_out = f"\n[{len(text) - MAX_CHARS:,} more characters in the file]" if len(text) > MAX_CHARS else ""
    return "\n".join(lines) + left_out


def one_line(text: str, width: int) -> str:
    """Return the beginning of a text on one line, at most ``width`` characters."""
    return visible(" ".join(text[: 4 * width].split()))[:width]


def word_diff(before: str, after: str) -> Iterator[tuple[Literal["same", "gone", "new"], str]]:
    """Yield pieces of both texts, word by word; removed words come before the words that replace them. Only the first
    MAX_COMPARED_WORDS words of each are compared; a last piece then reports that."""
    one, other = (re.findall(r"\S+\s*|\s+", text[:MAX_CHARS]) for text in (before, after))
    cut = max(len(one), len(other)) > MAX_COMPARED_WORDS
    one, other = one[:MAX_COMPARED_WORDS], other[:MAX_COMPARED_WORDS]
    # Words are compared without the space after them, so that an extended text keeps the last word of the shorter one.
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
