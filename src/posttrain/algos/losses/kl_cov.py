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


@POLICY_LOSSES.register("kl_cov", chooses_tokens=True)
def kl_cov(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mini_batch_tokens: int,
    chosen: Tensor | None = None,
    *,
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 2e-4,
    covariance_kl_coef: NonNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r per token; the max(1, covariance_share x tokens) tokens of largest covariance also get coef |policy - old|.

    r = exp(policy - old), not clipped. The covariance (of advantage and log-prob, see token_covariance) and the choice
    are over the whole mini-batch: for a part of it the choice is made before (``choose``).

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool; mini_batch_tokens, the loss
        tokens of the mini-batch; chosen [B, T] bool, the tokens to pull back, None where all of the mini-batch is here.
    Settings:
        covariance_share: share of a mini-batch's tokens that is pulled back, but at least one token.
        covariance_kl_coef: weight of the pull back to the old policy.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Raises: RequestError when these are not all tokens of the mini-batch, and none are chosen.
    Source: arXiv:2505.22617.
    """
    if chosen is None:
        need_whole_mini_batch(mask, mini_batch_tokens, "kl_cov")
        chosen = choose(policy_logprobs, old_logprobs, advantages, mask, covariance_share=covariance_share)
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    penalty = torch.where(chosen & mask, covariance_kl_coef * log_r.abs(), 0.0)
    return -torch.where(mask, advantages, 0.0) * log_r.exp() + penalty, distance_report(log_r, mask)


def choose(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    covariance_share: float,
    covariance_kl_coef: float = 1.0,
) -> Tensor:
    """The tokens [B, T] bool of a whole mini-batch that kl_cov pulls back. Arguments as there; no gradient."""
    covariance = torch.where(mask, token_covariance(policy_logprobs, advantages, mask), -torch.inf)
    tokens = int(mask.sum())
    chosen = torch.zeros_like(mask).flatten()
    chosen[covariance.flatten().topk(min(max(1, int(covariance_share * tokens)), tokens)).indices] = True
    return chosen.view_as(mask)
