"""The policy gradient of samples from another policy: weighted by the ratio, with no clip."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES


@POLICY_LOSSES.register("importance_sampling")
def importance_sampling(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r per token, with r = exp(policy - old): PPO without its clip; its variance grows with the distance.

    SkyRL sums it over the mini-batch: loss.aggregation=token_sum.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool. The log-ratio is clamped to
        [-20, 20] against overflow.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: SkyRL 0.3's and Tinker's loss of this name.
    """
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    return -torch.where(mask, advantages, 0.0) * log_r.exp(), distance_report(log_r.detach(), mask)
