"""Cross-entropy between a response's log-ratio, read as a logit, and its score."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import Positive


@POLICY_LOSSES.register("outcome_cross_entropy", per_response=True, aggregation="sequence_mean_token_mean")
def outcome_cross_entropy(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    scores: Tensor,
    *,
    log_ratio_scale: Positive = 0.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-s log sigmoid(z) - (1 - s) log sigmoid(-z), the same on every token; z = scale x the response's sum of policy - old.

    Trains the process reward model of PRIME (reward.process), whose old log-probs are those of its frozen reference: the model's
    log-ratio then tells right responses from wrong ones, and its parts are rewards of tokens.

    Args: log-probs [B, T] nats (policy carries grad); mask [B, T] bool; scores [B], from 0 for wrong to 1 for right.
    Settings:
        log_ratio_scale: logits per nat of the log-ratio (the paper's beta).
    Returns: loss [B, T] nats, 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: arXiv:2502.01456, equation 5.
    """
    summed = torch.where(mask, policy_logprobs - old_logprobs, 0.0).sum(dim=1)
    logits = log_ratio_scale * summed
    learned = torch.where(mask.any(dim=1), scores.to(logits.dtype), 0.0)
    loss = torch.nn.functional.softplus(logits) - learned * logits
    report = distance_report(log_ratio(policy_logprobs.detach(), old_logprobs, mask), mask)
    return torch.where(mask, loss[:, None], 0.0), report
