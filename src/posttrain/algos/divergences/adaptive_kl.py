"""Forward and reverse KL, weighed by where the student is off: at the teacher's likely tokens or at its unlikely ones."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("adaptive_kl")
def adaptive_kl(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
) -> Tensor:
    """w KL(q || p) + (1 - w) KL(p || q), with w = head gap / (head gap + tail gap), held constant; 1/2 where both gaps are 0.

    The tail is the teacher's least likely tokens, as many as have at most ``alpha`` of its mass together; the head is the rest.
    A gap is the sum of |q - p| over these tokens.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Settings:
        alpha: the teacher's mass of the tail.
    Returns: [N] nats.
    Source: "Rethinking Kullback-Leibler divergence in knowledge distillation for large language models", arXiv:2404.02657,
        whose head holds the mass; ROLL counts the tail's instead, and so does this.
    """
    with torch.no_grad():
        ascending, order = teacher_logprobs.exp().sort(dim=-1)
        gap = (ascending - student_logprobs.exp().gather(-1, order)).abs()
        tail = ascending.cumsum(dim=-1) <= alpha
        of_head = torch.where(tail, 0.0, gap).sum(dim=-1)
        both = gap.sum(dim=-1)
        weight = torch.where(both > 0, of_head / torch.where(both > 0, both, 1.0), 0.5)
    forward = vocabulary_kl(teacher_logprobs, student_logprobs)
    return weight * forward + (1 - weight) * vocabulary_kl(student_logprobs, teacher_logprobs)
