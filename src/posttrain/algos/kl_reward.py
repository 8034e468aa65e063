"""KL to the reference as a part of the reward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from posttrain.algos.ratio import row_mean
from posttrain.algos.shapes import check_same_shape
from posttrain.records.computed_tensors import by_rows, of_each_row


def penalize_kl(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> tuple[Tensor, float]:
    """token_rewards - kl_coef x KL(old || reference) on every sampled token.

    Args: token_rewards [B, T]; kl [B, T] nats, an estimate of token_kl or the KL over the vocabulary; mask [B, T] bool.
    Returns: token rewards [B, T], 0 where mask is False; and the KL that a controller steers by, nats per token: the mean
        over rows of each row's mean. Rows without a sampled token do not count.
    """
    check_same_shape(token_rewards=token_rewards, kl=kl, mask=mask)
    found = of_each_row(_means, kl, mask)
    means = found[found[:, 1] > 0, 0]
    measured = float(means.mean()) if len(means) else 0.0
    less = by_rows(partial(_less, kl_coef=kl_coef), token_rewards, kl, mask, dtype=token_rewards.dtype)
    return less, measured


def _means(kl: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row, and 1 where it has a sampled token, [B, 2]."""
    return torch.stack([row_mean(kl, mask).squeeze(1), mask.any(dim=1).to(kl.dtype)], dim=1)


def _less(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """token_rewards - kl_coef x kl, [B, T]."""
    return torch.where(mask, token_rewards - kl_coef * torch.where(mask, kl, 0.0), 0.0)
