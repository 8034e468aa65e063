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


def run_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each run of masked-in tokens without a break (a turn of an episode), on every token of the run.

    By hand: values 1 3 9 5 under the mask 1 1 0 1 give 2 2 0 5.

    Args: values [B, T]; mask [B, T] bool.
    Returns: [B, T]; 0 where mask is False.
    """
    kept = torch.where(mask, values, 0.0)
    before = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    run = (mask & ~before).long().cumsum(dim=1)  # what follows a run has its number too, and value 0
    empty = kept.new_zeros(len(mask), mask.shape[1] + 1)
    means = empty.scatter_add(1, run, kept) / empty.scatter_add(1, run, mask.to(kept.dtype)).clamp(min=1)
    return torch.where(mask, means.gather(1, run), 0.0)


def distance_report(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics logged by every loss, each [B, T]: ratio_mean, and kl_old, the k3 estimate of KL(old || policy): r - 1 - log r."""
    with torch.no_grad():
        ratio = log_ratio.exp()
        return {
            "ratio_mean": torch.where(mask, ratio, 0.0),
            "kl_old": torch.where(mask, ratio - 1 - log_ratio, 0.0),
        }
