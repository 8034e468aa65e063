"""KL(policy || reference) over the whole vocabulary, exactly, without keeping the logits of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.algos.logprobs import log_probabilities


def full_kl(
    policy_hidden: Tensor,
    policy_head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    *,
    temperature: float = 1.0,
    tokens_per_chunk: int = 256,
) -> Tensor:
    """sum over the vocabulary of p (log p - log q) at each position, p and q being softmax(hidden @ head.T / temperature).

    Works through tokens_per_chunk positions at a time; the backward pass computes a chunk's logits again instead of
    keeping them, so the memory is that of one chunk: about 4 x tokens_per_chunk x vocabulary floats.

    Args: policy_hidden [N, H] and policy_head [V, H], carrying grad; ref_hidden [N, H'] and ref_head [V, H'], which get
        none; both models share the vocabulary.
    Returns: [N] nats, at least 0 up to rounding; a token both models forbid (log-prob -inf) adds 0.
    """
    ref_hidden, ref_head = ref_hidden.detach(), ref_head.detach()

    def chunk_kl(policy_rows: Tensor, head: Tensor, ref_rows: Tensor) -> Tensor:
        log_p = log_probabilities(policy_rows @ head.T, temperature)
        log_q = log_probabilities(ref_rows @ ref_head.T, temperature)
        return vocabulary_kl(log_p, log_q)

    chunks = zip(policy_hidden.split(tokens_per_chunk), ref_hidden.split(tokens_per_chunk), strict=True)
    return torch.cat([checkpoint(chunk_kl, mine, policy_head, theirs, use_reentrant=False) for mine, theirs in chunks])


def vocabulary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum of p (log p - log q) over the last dimension.

    Args: log-probabilities [N, V] nats.
    Returns: [N] nats; where p is 0 a token adds 0, whatever q is; inf where the policy allows what the reference forbids.
    """
    possible = log_p > -torch.inf
    difference = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
    return (log_p.exp() * difference).sum(dim=-1)
