"""Direct reward optimisation: the policy gradient with a quadratic pull back to the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import Positive


@POLICY_LOSSES.register("dro")
def dro(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dro_beta: Positive,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi + beta / 2 (policy - old)^2 per token.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        dro_beta: weight of the quadratic pull back to the old policy, such as 0.05.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: arXiv:2405.19107; the token form is verl 0.9's.
    """
    difference = torch.where(mask, policy_logprobs - old_logprobs, 0.0)
    gain = torch.where(mask, advantages, 0.0) * torch.where(mask, policy_logprobs, 0.0)
    report = distance_report(log_ratio(policy_logprobs.detach(), old_logprobs, mask), mask)
    return -gain + dro_beta / 2 * difference.square(), report
