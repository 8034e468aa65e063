"""Geometric-mean policy optimisation: the response's clipped ratios are multiplied, not added."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio, row_mean
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("geo_mean", per_response=True, aggregation="sequence_mean_token_mean")
def geo_mean(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean of the clipped log-ratios), the same on every token of the response; A is the mean over its tokens.

    Clipping is one-sided and in the logarithm: where a token's advantage is positive its log-ratio is at most
    clip_ratio_high, where it is negative at least -clip_ratio_low. The paper's loss is the mean over responses, which is
    aggregation sequence_mean_token_mean; another aggregation weighs responses by their length. Everything belongs to a
    row, so splitting the batch changes nothing.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: the log-ratio is clipped below at minus this.
        clip_ratio_high: the log-ratio is clipped above at this.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction, ratio_mean, kl_old.
    Source: arXiv:2507.20673 (which has 0.4 for both clip ratios).
    """
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    raised, lowered = log_r.clamp(max=clip_ratio_high), log_r.clamp(min=-clip_ratio_low)
    clipped = torch.where(advantages > 0, raised, torch.where(advantages < 0, lowered, 0.0))
    response_loss = -row_mean(advantages, mask) * row_mean(clipped, mask).exp()
    report = {"clip_fraction": (mask & (advantages != 0) & (clipped != log_r)).float()}
    return torch.where(mask, response_loss, 0.0), report | distance_report(log_r, mask)
