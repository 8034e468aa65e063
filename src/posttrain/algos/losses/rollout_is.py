"""The policy gradient on the tokens about which policy and sampler agree."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("rollout_is")
def rollout_is(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r log pi per token where 1 - low < r < 1 + high, 0 elsewhere; r = exp(policy - rollout) carries no gradient.

    Args: log-probs [B, T] nats (policy carries grad), rollout the sampler's own; advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: tokens with a ratio below 1 - this leave the loss.
        clip_ratio_high: tokens with a ratio above 1 + this leave the loss.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the token was
        dropped), ratio_mean and kl_old, to the sampler.
    Source: SkyRL 0.3, the loss of this name; the band is IcePop's, 2025.
    """
    log_r = log_ratio(policy_logprobs.detach(), rollout_logprobs, mask)
    ratio = log_r.exp()
    kept = mask & (ratio > 1 - clip_ratio_low) & (ratio < 1 + clip_ratio_high)
    loss = -torch.where(kept, advantages, 0.0) * ratio * torch.where(kept, policy_logprobs, 0.0)
    return loss, {"clip_fraction": (mask & ~kept).float()} | distance_report(log_r, mask)
