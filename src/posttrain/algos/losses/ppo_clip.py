"""The clipped surrogate of PPO."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.ratio import LOG_RATIO_LIMIT, distance_report, log_ratio, run_mean
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    dual_clip: Annotated[float | None, Field(gt=1)] = None,
    ratio_of: Literal["token", "turn"] = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) per token, with r = exp(policy - old); with dual_clip c, at most -A c where A < 0.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool. The log-ratio is clamped to
        [-20, 20] against overflow.
    Settings:
        clip_ratio_low: the ratio is clipped below at 1 - this.
        clip_ratio_high: the ratio is clipped above at 1 + this.
        dual_clip: bounds the loss of tokens with a negative advantage at this ratio; null does not.
        ratio_of: token, or turn: the tokens that were sampled without a break share exp(their mean log-ratio), ROLL's segments.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the clipped branch
        won), dual_clip_fraction, ratio_mean, kl_old (k3 estimate of KL(old || policy): r - 1 - log r).
    Source: arXiv:1707.06347, equation 7; dual clip: arXiv:1912.09729, equation 5.
    """
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    shared = log_r
    if ratio_of == "turn":  # clamped after the mean, so that one token beyond the limit keeps its weight in it
        shared = run_mean(policy_logprobs - old_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(mask, advantages, 0.0)
    loss, report = clipped_surrogate(shared.exp(), advantages, clip_ratio_low, clip_ratio_high)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (bound < loss)
        loss = torch.where(bounded, bound, loss)
        report["dual_clip_fraction"] = bounded.float()
    return loss, report | distance_report(log_r, mask)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) and {clip_fraction: 1 where the clipped branch won}, all [B, T]."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(free, clipped), {"clip_fraction": (clipped > free).float()}
