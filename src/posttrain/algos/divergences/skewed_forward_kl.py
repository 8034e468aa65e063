"""The forward KL to a mixture of student and teacher, which stays finite where the student forbids a token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from posttrain.algos.distillation import mixture
from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("skewed_forward_kl")
def skewed_forward_kl(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, skew: Annotated[float, Field(ge=0, lt=1)] = 0.1
) -> Tensor:
    """KL(q || skew q + (1 - skew) p), with the teacher's q and the student's p.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Settings:
        skew: share of the distribution measured from (here the teacher's) in the mixture; 0 is the plain divergence.
    Returns: [N] nats.
    Source: DistiLLM, arXiv:2402.03898, section 3.1.
    """
    return vocabulary_kl(teacher_logprobs, mixture(teacher_logprobs, student_logprobs, skew))
