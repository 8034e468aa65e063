"""Ratio of the policy to the one that sampled, common to the policy losses."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) is 5e8, and its gradient is still a float32


def log_ratio(policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """policy - old, clamped to [-20, 20] against overflow.

    Args: log-probs [B, T] nats; mask [B, T] bool.
    Returns: [B, T]; 0, without gradient, where mask is False or beyond the clamp.
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, mask=mask)
    return torch.where(mask, policy_logprobs - old_logprobs, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's masked-in tokens, [B, 1]; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def distance_report(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics logged by every loss, each [B, T]: ratio_mean, and kl_old, the k3 estimate of KL(old || policy): r - 1 - log r."""
    with torch.no_grad():
        ratio = log_ratio.exp()
        return {
            "ratio_mean": torch.where(mask, ratio, 0.0),
            "kl_old": torch.where(mask, ratio - 1 - log_ratio, 0.0),
        }
