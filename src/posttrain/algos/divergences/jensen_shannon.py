"""The generalised Jensen-Shannon divergence of teacher and student."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from posttrain.algos.distillation import mixture
from posttrain.algos.kl_full import vocabulary_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("jensen_shannon")
def jensen_shannon(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
) -> Tensor:
    """JSD_beta = beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p, the teacher's q and the student's p.

    Symmetric at beta 0.5 and at most ln 2 there. Divided by beta it tends to the forward KL as beta falls to 0, divided by
    1 - beta to the reverse KL as beta rises to 1.

    Args: log-probabilities [N, V] nats; the student's carry grad.
    Settings:
        beta: weight of the teacher in the mixture.
    Returns: [N] nats.
    Source: GKD, arXiv:2306.13649, equation 1.
    """
    mixed = mixture(teacher_logprobs, student_logprobs, beta)
    return beta * vocabulary_kl(teacher_logprobs, mixed) + (1 - beta) * vocabulary_kl(student_logprobs, mixed)
