"""The text of single tokens, for display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_texts_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], list[str]]:
    """Return a function from token ids to the text of each, with its spaces and special tokens. A token that is part of a
    character shows U+FFFD; an id unknown to the tokenizer shows as ``<id 151935>``.

    A decoder may drop a leading space, so each token is decoded after another one, whose text is removed.
    """
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    lead = decoded(anchor)

    @cache  # at most as many entries as the vocabulary
    def text(number: int) -> str:
        return decoded([*anchor, number]).removeprefix(lead) or f"<id {number}>"

    return lambda ids: [text(number) for number in ids]
