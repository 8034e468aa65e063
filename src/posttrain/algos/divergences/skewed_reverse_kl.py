"""The reverse KL to a mixture of teacher and student, which stays finite where the teacher forbids a token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from posttrain.algos.distillation import mixture
from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("skewed_reverse_kl")
def skewed_reverse_kl(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, skew: Annotated[float, Field(ge=0, lt=1)] = 0.1
) -> Tensor:
    """KL(p || skew p + (1 - skew) q), with the student's p and the teacher's q.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Settings:
        skew: share of the distribution measured from (here the student's) in the mixture; 0 is the plain divergence.
    Returns: [N] nats.
    Source: DistiLLM, arXiv:2402.03898, section 3.1.
    """
    return vocabulary_kl(student_logprobs, mixture(student_logprobs, teacher_logprobs, skew))
