"""Self-play preference optimisation: a regression of the response's log-ratio on its advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio, row_mean
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import Positive


@POLICY_LOSSES.register("sppo", per_response=True, aggregation="sequence_mean_token_mean")
def sppo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    advantage_scale: Positive = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of policy - old over the response - advantage_scale x A)^2, the same on every token; A is the mean over its tokens.

    The log-ratio of a response is to become its scaled advantage: in the paper exp(eta (win rate - 1/2)), up to a constant, is
    the ratio of the next policy to this one. Its mean over responses is aggregation sequence_mean_token_mean; another weighs
    responses by their length. It goes with the advantage of the same name.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        advantage_scale: the log-ratio to reach per unit of advantage (the paper's eta).
    Returns: loss [B, T] nats squared, 0 where mask is False; and what to log, each [B, T]: sequence_log_ratio, the sum over the
        response, and its target; ratio_mean and kl_old of the single tokens.
    Source: arXiv:2405.00675; the advantage in place of the win rate is that of verl's recipe sppo.
    """
    moved = torch.where(mask, policy_logprobs - old_logprobs, 0.0).sum(dim=1, keepdim=True)
    target = advantage_scale * row_mean(advantages, mask)
    loss = torch.where(mask, (moved - target).square(), 0.0)
    report = {
        "sequence_log_ratio": torch.where(mask, moved.detach(), 0.0),
        "sequence_log_ratio_target": torch.where(mask, target, 0.0),
    }
    return loss, report | distance_report(log_ratio(policy_logprobs.detach(), old_logprobs, mask), mask)
