"""Divergence PPO with the KL: as dppo_tv, with the KL between token and rest as the measure of the move."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.losses.dppo_tv import kept_policy_gradient
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(
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

    Kept where the KL between the two-way distributions (token, any other) of old and new policy is at most
    clip_ratio_high for A > 0 or clip_ratio_low for A < 0, in nats (the paper has 0.05), and where the gradient leads back
    towards the old policy.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: largest KL, in nats, of a kept token with a negative advantage.
        clip_ratio_high: largest KL, in nats, of a kept token with a positive advantage.
        weight_limit: largest ratio that weighs a token.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the token was
        dropped), ratio_mean, kl_old.
    Source: arXiv:2602.04879, the binary approximation of the KL; 1e-8 in the logarithms as in verl 0.9.
    """
    new = torch.where(mask, policy_logprobs.detach(), 0.0).exp()
    old = torch.where(mask, old_logprobs, 0.0).exp()
    kl = old * ((old + 1e-8) / (new + 1e-8)).log() + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kept_rising = (new <= old) | (kl <= clip_ratio_high)
    kept_falling = (new >= old) | (kl <= clip_ratio_low)
    kept = torch.where(advantages > 0, kept_rising, kept_falling)
    return kept_policy_gradient(policy_logprobs, old_logprobs, advantages, mask, kept, weight_limit)
