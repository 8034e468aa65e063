"""Tapered off-policy REINFORCE: good responses are imitated at full weight, bad ones fade out as the policy leaves them."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative


@POLICY_LOSSES.register("topr")
def topr(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    scores: Tensor,
    *,
    positive_weight: NonNegative = 1.0,
    negative_weight: NonNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-w A log pi per token: w = positive_weight where the response's score is above 0, else negative_weight x min(r, 1).

    r = exp(policy - old), without gradient. The paper's ratio is that of the whole response; this is ROLL's token form.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool; scores [B], reward units, as they
        were given: not normalised, without a KL.
    Settings:
        positive_weight: weight of tokens of responses with a score above 0.
        negative_weight: weight of tokens of the other responses.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where r was cut to 1),
        ratio_mean, kl_old.
    Source: arXiv:2503.14286.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    positive = mask & (scores > 0)[:, None]
    tapered = negative_weight * log_r.exp().clamp(max=1.0)
    weights = torch.where(positive, positive_weight, tapered)
    loss = -torch.where(mask, advantages, 0.0) * weights * torch.where(mask, policy_logprobs, 0.0)
    report = {"clip_fraction": (mask & ~positive & (log_r > 0)).float()}
    return loss, report | distance_report(log_r, mask)
