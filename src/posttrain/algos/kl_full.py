"""KL(policy || reference) over the whole vocabulary, exactly (algos.fused_scoring computes it without keeping logits)."""

from __future__ import annotations

import torch
from torch import Tensor


def vocabulary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum of p (log p - log q) over the last dimension.

    Args: log-probabilities [N, V] nats.
    Returns: [N] nats; where p is 0 a token adds 0, whatever q is; inf where the policy allows what the reference forbids.
    """
    possible = log_p > -torch.inf
    difference = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
    return (log_p.exp() * difference).sum(dim=-1)
