"""KL(student || teacher): the student stays where the teacher puts its mass."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("reverse_kl")
def reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """sum of p (log p - log q), with the student's p and the teacher's q.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Returns: [N] nats.
    Source: MiniLLM, arXiv:2306.08543, equation 1.
    """
    return vocabulary_kl(student_logprobs, teacher_logprobs)
