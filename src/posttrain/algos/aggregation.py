"""Token losses to one number, divided by counts of the whole mini-batch so that parts of it add up."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape
from posttrain.records.batches import LossCounts


def aggregate(values: Tensor, mask: Tensor, mode: str, counts: LossCounts) -> Tensor:
    """This part's share of the mini-batch's loss; the shares of all parts, on all devices, sum to it.

    token_mean: sum of values / counts.tokens. token_sum: sum of values, divided by nothing.
    sequence_mean_token_mean: each row's mean, summed / counts.sequences. sequence_mean_token_sum: each row's sum,
    summed / counts.sequences. Rows without a loss token do not count.

    Args: values [B, T]; mask [B, T] bool; counts over the whole mini-batch.
    Returns: scalar, in the unit of values; 0 (with a zero gradient) when nothing is masked in.
    """
    check_same_shape(values=values, mask=mask)
    kept = torch.where(mask, values, 0.0)
    if mode == "token_mean":
        return kept.sum() / max(counts.tokens, 1)
    if mode == "token_sum":
        return kept.sum()
    if mode == "sequence_mean_token_mean":
        row_tokens = mask.sum(dim=1).clamp(min=1)
        return (kept.sum(dim=1) / row_tokens).sum() / max(counts.sequences, 1)
    if mode == "sequence_mean_token_sum":
        return kept.sum() / max(counts.sequences, 1)
    raise KeyError(f"unknown aggregation {mode!r}")
