"""Tokens of an episode that a fork's loop plays: which of a response stay, and what follows them.

The loop writes the next context itself: the one before, the response as text, cut and tokenised again, and the observation. The
response's tokens stay as they were sampled, up to the place where the loop cut it, and the rest of the context follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.templates import ids_of


@dataclass(frozen=True, slots=True)
class Follows:
    """The tokens that a context adds to the conversation before it."""

    keeps: int  # tokens of the last response that stay
    added: tuple[int, ...]  # tokens behind them


@dataclass(slots=True)
class Context:
    """The context that the loop gave last, and the response to it."""

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    action: str = ""  # the response without special tokens
    response: Sequence[int] = ()
    first: int = 0  # tokens of the first context

    def answered(self, ids: Sequence[int], response: Sequence[int]) -> None:
        """Take the response to a context."""
        self.ids, self.response, self.action = list(ids), response, self._text(response)

    def follows(self, ids: Sequence[int]) -> Follows | None:
        """Return what a further context adds; None where it does not begin with the context before, or adds nothing."""
        count = len(self.ids)
        if list(ids[:count]) != self.ids:
            return None
        rest = list(ids[count:])
        text, place = self._taken(rest)
        keeps, lost = self._within(text)
        added = (*(ids_of(self.tokenizer, lost) if lost else ()), *rest[place:])
        return Follows(keeps, added) if added and keeps else None

    def end(self, responses: Sequence[int]) -> int | None:
        """Return how many tokens of the last response the loop's final responses hold; None where they begin otherwise, or for
        all."""
        before = self.ids[self.first :]
        if list(responses[: len(before)]) != before:
            return None
        text, _ = self._taken(list(responses[len(before) :]))
        return None if text == self.action else self._within(text)[0] or None

    def _taken(self, ids: list[int]) -> tuple[str, int]:
        """The longest beginning of tokens that is a beginning of the action. Returns: its text, and the number of tokens."""
        whole = ids_of(self.tokenizer, self.action)
        if ids[: len(whole)] == whole:
            return self.action, len(whole)
        best, text = 0, ""
        for count in range(1, len(ids) + 1):
            said = self._text(ids[:count])
            if self.action.startswith(said):
                best, text = count, said
            elif not said.endswith("\ufffd"):  # a part of a character
                break
        return text, best

    def _within(self, text: str) -> tuple[int, str]:
        """The number of the response's tokens that lie in a text, without an end token behind it, and the part of a partly cut
        token's text."""
        count, special = len(self.response), set(self.tokenizer.all_special_ids)
        while count > 1 and self.response[count - 1] in special:
            count -= 1
        while count and not text.startswith(self._text(self.response[:count])):
            count -= 1
        return count, text[len(self._text(self.response[:count])) :]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
