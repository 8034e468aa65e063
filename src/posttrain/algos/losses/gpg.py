"""The plain policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES


@POLICY_LOSSES.register("gpg", has_ratio=False)
def gpg(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi per token: no ratio and no clip, so it is meant for one update per step.

    Args: log-probs [B, T] nats (policy carries grad; old is only looked at for the report); advantages [B, T];
        mask [B, T] bool.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: arXiv:2504.02546; it is REINFORCE.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    loss = -torch.where(mask, advantages, 0.0) * torch.where(mask, policy_logprobs, 0.0)
    return loss, distance_report(log_r, mask)
