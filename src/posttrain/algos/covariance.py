"""The covariance of advantage and log-prob, token by token: what drives the policy's entropy down."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.statistics import masked_mean
from posttrain.errors import Problem, RequestError


def token_covariance(policy_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A) (log pi - mean log pi), with means over all masked-in tokens. No gradient.

    Args: policy_logprobs [B, T] nats; advantages [B, T]; mask [B, T] bool.
    Returns: [B, T] float64; 0 where mask is False.
    Source: arXiv:2505.22617.
    """
    logprobs, advantages = policy_logprobs.detach().double(), advantages.double()
    covariance = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return torch.where(mask, covariance, 0.0)


def need_whole_mini_batch(mask: Tensor, mini_batch_tokens: int, loss: str) -> None:
    """Refuse a part of a mini-batch: a choice of tokens among all cannot be made seeing some.

    Args: mask [B, T] bool of this part; mini_batch_tokens, the loss tokens of the whole.
    Raises: RequestError.
    """
    here = int(mask.sum())
    if here != mini_batch_tokens:
        raise RequestError(
            Problem(
                f"{loss} chooses tokens among those of the whole mini-batch, and a micro-batch holds {here} of "
                f"{mini_batch_tokens} of them",
                fix="use micro-batches as large as the mini-batch",
                field="policy.sequences_per_micro_batch_per_device",
            )
        )
