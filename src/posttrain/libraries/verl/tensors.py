"""Functions on token ids that datasets written for verl import from it."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def masked_sum(values: Tensor, mask: Tensor, axis: Any = None) -> Tensor:
    """Sum the values that the mask marks, over all dimensions or over ``axis``."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values that the mask marks; divided by n - 1 with ``unbiased``.

    Raises: ValueError where fewer values are marked than it needs.
    """
    count = mask.sum()
    if count < 1 + int(unbiased):
        raise ValueError(f"a variance of {int(count)} values")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Bring the values that the mask marks to variance 1 and mean 0; with ``shift_mean`` false the mean stays."""
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def as_torch_index(index: Any, device: Any = None) -> Tensor:
    """Number the groups of rows from 0. Returns: [rows] int64."""
    found = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    return torch.from_numpy(np.unique(found, return_inverse=True)[1].reshape(-1)).to(device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Any = None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, standard deviation (sample; 1 and mean 0 for a group of one) and size of each group, [groups] each."""
    groups = int(gidx.max()) + 1 if len(gidx) else 0
    count = torch.zeros(groups).index_add_(0, gidx, torch.ones(len(gidx)))
    mean = torch.zeros(groups).index_add_(0, gidx, scores.float()) / count.clamp(min=1)
    square = torch.zeros(groups).index_add_(0, gidx, (scores.float() - mean[gidx]) ** 2)
    std = (square / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    alone = count <= 1
    return torch.where(alone, 0.0, mean), torch.where(alone, 1.0, std), count


def copy_to_local(src: str, cache_dir: str | None = None, **_: Any) -> str:
    """Return a path as it is: files are local when a class reads them."""
    return src
