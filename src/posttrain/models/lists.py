"""Tokenizers for programs written for transformers 4, whose chat template gave a list of token ids."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from posttrain.config.model import ModelConfig
from posttrain.models.loading import load_tokenizer


@lru_cache(maxsize=1)
def tokenizer_of(model: tuple[tuple[str, Any], ...]) -> Any:
    """Load the tokenizer of these fields of ModelConfig, as programs of verl expect it: with a padding token (the end token where
    there is none), and with an ``apply_chat_template`` that gives a list of tokens, and a mapping only with return_dict."""
    tokenizer: Any = load_tokenizer(ModelConfig(**dict(model)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer
