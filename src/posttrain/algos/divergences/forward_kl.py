"""KL(teacher || student): the student covers everything that the teacher does."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("forward_kl")
def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """sum of q (log q - log p), with the teacher's q and the student's p; its gradient in the student's logits is p - q.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Returns: [N] nats.
    Source: G. Hinton and others, "Distilling the knowledge in a neural network", arXiv:1503.02531 (cross-entropy to the teacher,
        which differs by the teacher's entropy).
    """
    return vocabulary_kl(teacher_logprobs, student_logprobs)
