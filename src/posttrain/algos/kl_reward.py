"""KL to the reference as a part of the reward."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.algos.ratio import row_mean
from posttrain.algos.shapes import check_same_shape
from posttrain.records.computed_tensors import by_rows, of_each_row_together


class PenalizedRewards(NamedTuple):
    """See ``penalize_kl``."""

    tokens: Tensor  # [B, T]; 0 where mask is False
    sums: Tensor  # [B], of each row's tokens
    # The KL that a controller steers by, nats per token: the mean over rows of each row's mean. Rows without a sampled token do
    # not count.
    measured: float


def penalize_kl(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> PenalizedRewards:
    """token_rewards - kl_coef x KL(old || reference) on every sampled token.

    Args: token_rewards [B, T]; kl [B, T] nats, an estimate of token_kl or the KL over the vocabulary; mask [B, T] bool.
    """
    check_same_shape(token_rewards=token_rewards, kl=kl, mask=mask)
    less = by_rows(partial(_less, kl_coef=kl_coef), token_rewards, kl, mask, dtype=token_rewards.dtype)
    found, sums = of_each_row_together([(_means, (kl, mask)), (sums_of_rows, (less,))])
    means = found[found[:, 1] > 0, 0]
    measured = float(means.mean()) if len(means) else 0.0
    return PenalizedRewards(less, sums.squeeze(1), measured)


def sums_of_rows(values: Tensor) -> Tensor:
    """The sum of each row, [B, 1]."""
    return values.sum(dim=1, keepdim=True)


def _means(kl: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row, and 1 where it has a sampled token, [B, 2]."""
    return torch.stack([row_mean(kl, mask).squeeze(1), mask.any(dim=1).to(kl.dtype)], dim=1)


def _less(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """token_rewards - kl_coef x kl, [B, T]."""
    return torch.where(mask, token_rewards - kl_coef * torch.where(mask, kl, 0.0), 0.0)
