"""The text of single tokens, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_texts_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], list[str]]:
    """A function from token ids to the text of each, with its spaces and special tokens written out. A token that is part of
    a character has U+FFFD for it; an id that the tokenizer does not know is named ``<id 151935>``.

    A decoder may drop the space that begins a text, so each token is decoded behind another one, whose text is taken off.
    """
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    lead = decoded(anchor)

    @cache  # as many entries as the vocabulary, at most
    def text(number: int) -> str:
        return decoded([*anchor, number]).removeprefix(lead) or f"<id {number}>"

    return lambda ids: [text(number) for number in ids]
