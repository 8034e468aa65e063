"""KL-Cov: the unclipped surrogate, with a pull back to the old policy on the tokens of largest covariance."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.covariance import need_whole_mini_batch, token_covariance
from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative


@POLICY_LOSSES.register("kl_cov")
def kl_cov(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mini_batch_tokens: int,
    *,
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 2e-4,
    covariance_kl_coef: NonNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r per token; the max(1, covariance_share x tokens) tokens of largest covariance also get coef |policy - old|.

    r = exp(policy - old), not clipped. The covariance (of advantage and log-prob, see token_covariance) and the choice
    are over the whole mini-batch and need the current log-probs of all its tokens before the first backward pass, so the
    mini-batch must come in one piece.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool; mini_batch_tokens, the loss
        tokens of the mini-batch.
    Settings:
        covariance_share: share of a mini-batch's tokens that is pulled back, but at least one token.
        covariance_kl_coef: weight of the pull back to the old policy.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Raises: RequestError when these are not all tokens of the mini-batch.
    Source: arXiv:2505.22617.
    """
    need_whole_mini_batch(mask, mini_batch_tokens, "kl_cov")
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    covariance = torch.where(mask, token_covariance(policy_logprobs, advantages, mask), -torch.inf)
    count = min(max(1, int(covariance_share * mini_batch_tokens)), mini_batch_tokens)
    chosen = torch.zeros_like(mask).flatten()
    chosen[covariance.flatten().topk(count).indices] = True
    penalty = torch.where(chosen.view_as(mask), covariance_kl_coef * log_r.abs(), 0.0)
    return -torch.where(mask, advantages, 0.0) * log_r.exp() + penalty, distance_report(log_r, mask)
