"""Group sequence policy optimisation: one ratio for the whole response."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.losses.ppo_clip import clipped_surrogate
from posttrain.algos.ratio import distance_report, log_ratio, row_mean
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("gspo", aggregation="sequence_mean_token_mean")
def gspo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with s = exp(mean of policy - old over the response) in the place of every token's ratio.

    The token form (GSPO-token): each token's ratio has the value of s and the gradient of s x its own log-prob, so with
    one advantage per response and sequence_mean_token_mean it is GSPO itself. The mean log-ratio is at most 10. Clip
    ratios are much smaller than PPO's: the paper has 3e-4 and 4e-4. s belongs to a row, and rows are not split over
    micro-batches, so neither is the loss.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        clip_ratio_low: the ratio is clipped below at 1 - this.
        clip_ratio_high: the ratio is clipped above at 1 + this.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction; ratio_mean and kl_old of the
        single tokens.
    Source: arXiv:2507.18071, its token variant.
    """
    token_log_ratio = log_ratio(policy_logprobs, old_logprobs, mask)
    sequence = torch.where(mask, policy_logprobs - old_logprobs, 0.0)
    kept = torch.where(mask, policy_logprobs, 0.0)
    log_s = (row_mean(sequence, mask).detach() + kept - kept.detach()).clamp(max=10.0)
    loss, report = clipped_surrogate(log_s.exp(), torch.where(mask, advantages, 0.0), clip_ratio_low, clip_ratio_high)
    return loss, report | distance_report(token_log_ratio.detach(), mask)
