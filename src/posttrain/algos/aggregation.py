"""Token losses to one number, divided by counts of the whole mini-batch so that parts of it add up."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape
from posttrain.records.batches import LossCounts


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    counts: LossCounts,
    *,
    norm_tokens: int | None = None,
    group_index: Tensor | None = None,
) -> Tensor:
    """This part's share of the mini-batch's loss; the shares of all parts, on all devices, sum to it.

    token_mean: sum of values / counts.tokens. token_sum: sum of values, divided by nothing.
    sequence_mean_token_mean: each row's mean, summed / counts.sequences. sequence_mean_token_sum: each row's sum,
    summed / counts.sequences. sequence_mean_token_sum_norm: the same / norm_tokens besides, as in verl 0.9 and SkyRL (verl
    before 0.7 and ROLL divide the sum of all values by a number of tokens and not by that of rows). prompt_mean: the mean over
    the tokens of all responses to a prompt, summed / number of prompts (SkyRL). Rows and prompts without a loss token do not
    count.

    Args: values [B, T]; mask [B, T] bool; counts over the whole mini-batch; norm_tokens and group_index [B] int64, for the
        modes that read them.
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
    if mode == "sequence_mean_token_sum_norm":
        assert norm_tokens is not None, "sequence_mean_token_sum_norm divides by norm_tokens"
        return kept.sum() / (max(counts.sequences, 1) * norm_tokens)
    if mode == "prompt_mean":
        assert group_index is not None, "prompt_mean needs to know the rows of a prompt"
        prompt_tokens = [counts.prompt_tokens.get(group, 1) for group in group_index.tolist()]
        row_sums = kept.sum(dim=1) / torch.tensor(prompt_tokens, dtype=kept.dtype, device=kept.device)
        return row_sums.sum() / max(len(counts.prompt_tokens), 1)
    raise KeyError(f"unknown aggregation {mode!r}")
