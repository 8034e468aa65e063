"""The text of a response while it is sampled, in pieces that no further token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # stands for the bytes of a character whose other bytes are still to come


class TextPieces:
    """Turns tokens into pieces of text, whose concatenation is the text of the whole response.

    Args: text_of decodes tokens. stops, texts that end the response and do not belong to it. opening, texts that begin a tool
        call where calls are parsed: what follows one is no text, unless the calls turn out to be malformed; and white space
        before it is dropped.
    """

    def __init__(
        self, text_of: Callable[[Sequence[int]], str], *, stops: Sequence[str] = (), opening: Sequence[str] = ()
    ):
        self._text_of = text_of
        self._held_back = (*stops, *opening)
        self._opening = tuple(opening)
        self._ids: list[int] = []
        # Tokens are decoded together with some before them, on which the text of a token can depend: from ``first`` on.
        self._first = self._last = 0
        self._taken = 0  # characters of the text from ``first`` on that belong to ``_text``
        self._text = ""  # that no further token changes
        self._given = 0  # characters of it that were returned

    def add(self, token_ids: Sequence[int]) -> str:
        """Take further tokens. Returns: the text that is certain with them and was not returned before."""
        self._ids += token_ids
        text = self._text_of(self._ids[self._first :])
        complete = text.rstrip(_INCOMPLETE)
        self._text += complete[self._taken :]
        self._taken = max(self._taken, len(complete))
        if complete == text:
            self._first, self._last = self._last, len(self._ids)
            self._taken = len(self._text_of(self._ids[self._first :]))
        end = self._certain()
        piece, self._given = self._text[self._given : end], max(self._given, end)
        return piece

    def rest(self, whole: str) -> str:
        """Return what of the whole text was not returned in pieces."""
        given = self._text[: self._given]
        same = next((place for place, (a, b) in enumerate(zip(given, whole, strict=False)) if a != b), len(given))
        return whole[same:]

    def _certain(self) -> int:
        """Count the characters that are not, and will not become, part of a stop or a call."""
        text = self._text
        found = [place for mark in self._held_back if (place := text.find(mark)) >= 0]
        end = min(found, default=len(text))
        if not found:
            end -= max((begun(text, mark) for mark in self._held_back), default=0)
        return len(text[:end].rstrip()) if self._opening else end


def begun(text: str, mark: str) -> int:
    """Count the characters at the end of a text with which a mark may begin."""
    longest = min(len(mark) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
