"""Off-policy sequence masking: responses that the policy has moved away from teach nothing by what they did wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import row_mean


def off_policy_tokens(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """Tokens with a negative advantage in a response whose mean of rollout - policy log-probs is above ``limit``.

    That mean is an estimate of KL(sampler || policy) per token: of the updates since the response was sampled, and of the gap
    between sampler and trainer. It is taken over a row's loss tokens, and a row is never split, so micro-batches change nothing.

    Args: log-probs [B, T] nats; advantages [B, T]; mask [B, T] bool; limit in nats per token.
    Returns: [B, T] bool, False where mask is False. No gradient.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1 (TRL: off_policy_mask_threshold).
    """
    with torch.no_grad():
        gap = row_mean(torch.where(mask, rollout_logprobs - policy_logprobs, 0.0), mask)
        return mask & (gap > limit) & (torch.where(mask, advantages, 0.0) < 0)
