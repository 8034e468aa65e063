"""Log-prob of a drawn token, and entropy of the draw, from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float32 at least.

    Args: logits [N, vocabulary], any float dtype; temperature > 0.
    Returns: [N, vocabulary] nats, carrying gradient to the logits.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (scaled if temperature == 1.0 else scaled / temperature).log_softmax(dim=1)


def token_logprobs(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of the given tokens.

    Args: log_probabilities [N, vocabulary] nats; tokens [N] int64.
    Returns: [N] nats.
    """
    return log_probabilities.gather(1, tokens[:, None]).squeeze(1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """- sum p log p of each row; a forbidden token (log-prob -inf) adds 0.

    Args: log_probabilities [N, vocabulary] nats.
    Returns: [N] nats.
    """
    # 0 * -inf would be NaN.
    finite = log_probabilities.clamp(min=torch.finfo(log_probabilities.dtype).min)
    return -(log_probabilities.exp() * finite).sum(dim=1)


def sum_pi_squared(log_probabilities: Tensor) -> Tensor:
    """Sum of the squared probabilities of each row: 1 for a certain draw, 1 / vocabulary for an even one.

    Args: log_probabilities [N, vocabulary] nats.
    Returns: [N] in (0, 1].
    """
    return (2 * log_probabilities).exp().sum(dim=1)
