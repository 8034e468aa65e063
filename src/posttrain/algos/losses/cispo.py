"""Clipped importance-sampling weights on the policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES


@POLICY_LOSSES.register("cispo")
def cispo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A w log pi per token, where the weight w = clip(r, 1 - low, 1 + high), r = exp(policy - old), carries no gradient.

    Unlike in PPO every token keeps a gradient; the clip only bounds its weight. (The paper leaves the lower side open.)

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the weight was
        clipped), ratio_mean, kl_old.
    Source: arXiv:2506.13585.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    ratio = log_r.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = -torch.where(mask, advantages, 0.0) * weight * torch.where(mask, policy_logprobs, 0.0)
    report = {"clip_fraction": (mask & (weight != ratio)).float()}
    return loss, report | distance_report(log_r, mask)
