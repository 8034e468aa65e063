"""Prompts of completions: a text, or token ids, that no chat template renders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.data.templates import ids_of
from posttrain.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def raw_prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | tuple[int, ...], *, begins: bool = True
) -> tuple[int, ...]:
    """Return the token ids of a prompt, or of what follows one (``begins`` False: no special tokens are added to a text).

    Raises: DataError for a token id outside the vocabulary, or a text without tokens.
    """
    if isinstance(prompt, str):
        ids = tuple(tokenizer(prompt, verbose=False)["input_ids"] if begins else ids_of(tokenizer, prompt))
        if not ids:
            raise DataError(Problem("the prompt has no tokens"))
        return ids
    size = len(tokenizer)
    if not all(0 <= token < size for token in prompt):
        raise DataError(Problem(f"prompt holds a token id outside 0 to {size - 1}"))
    return tuple(prompt)
