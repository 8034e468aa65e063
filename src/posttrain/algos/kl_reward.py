"""KL to the reference as a part of the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import row_mean
from posttrain.algos.shapes import check_same_shape


def penalize_kl(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> tuple[Tensor, float]:
    """token_rewards - kl_coef x KL(old || reference) on every sampled token.

    Args: token_rewards [B, T]; kl [B, T] nats, an estimate of token_kl or the KL over the vocabulary; mask [B, T] bool.
    Returns: token rewards [B, T], 0 where mask is False; and the KL that a controller steers by, nats per token: the mean
        over rows of each row's mean. Rows without a sampled token do not count.
    """
    check_same_shape(token_rewards=token_rewards, kl=kl, mask=mask)
    kl = torch.where(mask, kl, 0.0)
    means = row_mean(kl, mask).squeeze(1)[mask.any(dim=1)]
    measured = float(means.mean()) if len(means) else 0.0
    return torch.where(mask, token_rewards - kl_coef * kl, 0.0), measured
