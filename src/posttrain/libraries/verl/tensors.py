"""Functions on token ids that datasets written for verl import from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Pad the last dimension with ``pad_token_id``; a longer tensor stays as it is."""
    lacking = max(max_seq_len - tensors.shape[-1], 0)
    return pad(tensors, (lacking, 0) if left_pad else (0, lacking), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or cut token ids and their mask, both [batch, tokens], to [batch, max_length].

    Args: ``truncation``: left keeps the end, right the beginning, middle both ends; error refuses longer ones.
    Raises: NotImplementedError for a longer sequence with ``truncation="error"``.
    """
    length = input_ids.shape[-1]
    if length > max_length:
        head = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation)
        if head is None:
            raise NotImplementedError(f"a prompt of {length} tokens is longer than {max_length}")
        kept = torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)])
        return input_ids[:, kept], attention_mask[:, kept]
    padded = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
    return padded, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """Tokenise a text without special tokens, then as ``postprocess_data``. Returns: ids and mask, [1, max_length] each."""
    found = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = found["input_ids"], found["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return each token's position among those that the mask [..., tokens] marks; 0 on padding before them."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def masked_mean(values: Tensor, mask: Tensor, axis: Any = None) -> Tensor:
    """Average the values that the mask marks, over all dimensions or over ``axis``."""
    kept = torch.where(mask.bool(), values, 0.0)
    return kept.sum(dim=axis) / (mask.sum(dim=axis) + 1e-8)


def copy_to_local(src: str, cache_dir: str | None = None, **_: Any) -> str:
    """Return a path as it is: files are local when a class reads them."""
    return src
