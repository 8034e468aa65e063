"""Clipped importance-sampling weights on the policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("cispo")
def cispo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    drop_clipped: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A w log pi per token, where the weight w = clip(r, 1 - low, 1 + high), r = exp(policy - old), carries no gradient.

    Unlike in PPO every token keeps a gradient; the clip only bounds its weight. (The paper leaves the lower side open.) With
    drop_clipped the tokens that PPO would stop lose theirs too: those with A > 0 beyond 1 + high, or A < 0 beyond 1 - low
    (the paper's unified form, equation 7). Low 1 and high 0 give w = min(r, 1): truncated importance sampling, ROLL's tis.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: the ratio is clipped below at 1 - this.
        clip_ratio_high: the ratio is clipped above at 1 + this.
        drop_clipped: tokens whose ratio is beyond the clip in the direction of their advantage leave the loss.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the weight was
        clipped), ratio_mean, kl_old.
    Source: arXiv:2506.13585.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    ratio = log_r.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    report = {"clip_fraction": (mask & (weight != ratio)).float()}
    advantages = torch.where(mask, advantages, 0.0)
    if drop_clipped:
        gone = torch.where(advantages > 0, ratio > 1 + clip_ratio_high, ratio < 1 - clip_ratio_low)
        advantages = torch.where(gone, 0.0, advantages)
    loss = -advantages * weight * torch.where(mask, policy_logprobs, 0.0)
    return loss, report | distance_report(log_r, mask)
