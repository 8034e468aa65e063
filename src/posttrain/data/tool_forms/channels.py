"""The parts of a reply whose form has channels: thoughts, and what the user reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from posttrain.data.text_pieces import TextPieces, begun
from posttrain.data.tool_forms import marks_of
from posttrain.registry import TOOL_FORMS


class Said(NamedTuple):
    """A reply without marks and without tool calls."""

    content: str
    reasoning: str = ""


def has_channels(form: str) -> bool:
    return bool(TOOL_FORMS.facts(form).channels)


def said_in(form: str, reply: str, *, calls: bool = True, whole: bool = True) -> Said:
    """Split a reply into its parts; without channels all of it is content.

    Args: calls, False where its calls are no calls for the reader, so that their texts belong to the content; whole, False
        while it is sampled: then only parts whose channel is certain are returned.
    """
    if not has_channels(form):
        return Said(reply)
    split: Callable[..., Said] = sys.modules[TOOL_FORMS.get(form).__module__].said
    return split(reply, calls=calls, whole=whole)


class SaidPieces:
    """The pieces of a reply with channels while it is sampled. Args: as TextPieces."""

    def __init__(self, form: str, text_of: Callable[[Sequence[int]], str], *, stops: Sequence[str] = ()):
        self._form = form
        self._pieces = TextPieces(text_of, stops=stops)
        self._text = ""
        self._given = Said("")

    def add(self, token_ids: Sequence[int]) -> Said:
        """Take further tokens. Returns: what is certain with them and was not returned before."""
        self._text += self._pieces.add(token_ids)
        end = len(self._text) - max(begun(self._text, mark) for mark in marks_of(self._form))
        return self.rest(said_in(self._form, self._text[:end], whole=False))

    def rest(self, said: Said) -> Said:
        """Return what of the parts was not returned before."""
        given = self._given
        more = Said(*(new[len(old) :] if new.startswith(old) else "" for new, old in zip(said, given, strict=True)))
        self._given = Said(given.content + more.content, given.reasoning + more.reasoning)
        return more
