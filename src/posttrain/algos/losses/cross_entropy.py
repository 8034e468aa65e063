"""Supervised learning on the sampled responses, whatever their advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES


@POLICY_LOSSES.register("cross_entropy", has_ratio=False)
def cross_entropy(policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-log pi per token. Advantages are not read: choose the responses instead (group_filter, rejection sampling).

    Args: log-probs [B, T] nats (policy carries grad; old is only looked at for the report); mask [B, T] bool.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: maximum likelihood; SkyRL 0.3's loss of this name.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    return -torch.where(mask, policy_logprobs, 0.0), distance_report(log_r, mask)
