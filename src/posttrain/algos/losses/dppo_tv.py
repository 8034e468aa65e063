"""Divergence PPO with total variation: tokens leave the loss by how far their probability moved, not their ratio."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    weight_limit: Annotated[float, Field(ge=1)] = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A min(r, weight_limit) log pi on the tokens that are kept; the weight carries no gradient, r = exp(policy - old).

    Kept where p - p_old <= clip_ratio_high for A > 0 and p - p_old >= -clip_ratio_low for A < 0, p being the token's
    probability: the clip ratios are thresholds in probability here (the paper has 0.15).

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: largest fall in probability of a kept token.
        clip_ratio_high: largest rise in probability of a kept token.
        weight_limit: largest ratio that weighs a token.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the token was
        dropped), ratio_mean, kl_old.
    Source: arXiv:2602.04879, the binary approximation of the total variation.
    """
    move = torch.where(mask, policy_logprobs.detach().exp() - old_logprobs.exp(), 0.0)
    kept = torch.where(advantages > 0, move <= clip_ratio_high, move >= -clip_ratio_low)
    return kept_policy_gradient(policy_logprobs, old_logprobs, advantages, mask, kept, weight_limit)


def kept_policy_gradient(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, kept: Tensor, weight_limit: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A min(r, weight_limit) log pi where kept [B, T] bool, 0 elsewhere; and its report."""
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    kept = mask & kept
    weight = log_r.exp().clamp(max=weight_limit)
    loss = -torch.where(kept, advantages, 0.0) * weight * torch.where(kept, policy_logprobs, 0.0)
    return loss, {"clip_fraction": (mask & ~kept).float()} | distance_report(log_r, mask)
