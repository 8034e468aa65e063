"""Comparison of a student's and a teacher's distributions: temperatures, the teacher's top k, mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.errors import ShapeError

Divergence = Callable[[Tensor, Tensor], Tensor]  # student's and teacher's log-probabilities [N, V] -> [N] nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of a student with a teacher at one position."""

    divergence: Divergence
    temperature: float = 1.0  # divides the logits of both
    teacher_temperature: float = 1.0  # divides the teacher's besides
    top_k: int | None = None  # the teacher's most likely tokens; None: the whole vocabulary
    rest: str = "bucket"  # the other tokens: one token (bucket), left out and the top k renormalized, or dropped
    min_logprob: float | None = None  # lower log-probabilities count as this one


def mixture(first_logprobs: Tensor, second_logprobs: Tensor, share: float) -> Tensor:
    """log(share x first + (1 - share) x second), in log space.

    Args: log-probabilities of one shape, nats; share in [0, 1).
    """
    if share == 0:
        return second_logprobs
    return torch.logaddexp(first_logprobs + math.log(share), second_logprobs + math.log1p(-share))


def compare(student_logits: Tensor, teacher_logits: Tensor, how: Comparison) -> Tensor:
    """The divergence at N positions, from whole logits [N, V]. Returns: [N] nats, carrying the gradient of the student's logits.

    Raises: ShapeError when the top k is larger than the vocabulary.
    """
    student = (student_logits / how.temperature).log_softmax(dim=-1)
    teacher = (teacher_logits / (how.temperature * how.teacher_temperature)).log_softmax(dim=-1)
    if how.top_k is None:
        return _measured(student, teacher, how)
    if how.top_k > teacher.shape[-1]:
        raise ShapeError(f"the top {how.top_k} of a vocabulary of {teacher.shape[-1]} tokens")
    top, ids = teacher.topk(how.top_k, dim=-1)
    return _measured_at(student, ids, top, _rest_of(teacher, ids), how)


def compare_top(student_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, how: Comparison) -> Tensor:
    """The divergence at N positions, from the student's logits [N, V] and the teacher's k most likely tokens.

    Args: top_ids [N, k] int64; top_logprobs [N, k] nats, of the whole distribution at the teacher's temperature.
    Returns: [N] nats, carrying the gradient of the student's logits.
    """
    student = (student_logits / how.temperature).log_softmax(dim=-1)
    return _measured_at(student, top_ids, top_logprobs, _rest_of_mass(top_logprobs), how)


def compare_chosen(near: Tensor, others: Tensor | None, top_logprobs: Tensor, how: Comparison) -> Tensor:
    """The divergence at N positions, from the student's log-probs of the teacher's k most likely tokens.

    Args: near [N, k] nats, at how.temperature; others [N, 1] nats, of all other tokens together, None where there are none;
        top_logprobs [N, k] as in compare_top.
    Returns: [N] nats, carrying the gradients of near and others.
    """
    return _measured_near(near, others, top_logprobs, _rest_of_mass(top_logprobs), how)


def _rest_of_mass(top_logprobs: Tensor) -> Tensor:
    """The log-prob [N, 1] of all tokens but the top k."""
    # Rounding of log-probs that were computed elsewhere hides a rest below the resolution of float32.
    mass = top_logprobs.exp().sum(dim=-1, keepdim=True)
    return (1 - mass).clamp(min=torch.finfo(torch.float32).eps).log()


def _measured_at(student: Tensor, ids: Tensor, top: Tensor, rest: Tensor, how: Comparison) -> Tensor:
    """The divergence over the top k tokens. Args: student [N, V], ids and top [N, k], rest [N, 1] the teacher's others."""
    others = _rest_of(student, ids) if how.rest == "bucket" and ids.shape[-1] < student.shape[-1] else None
    return _measured_near(student.gather(-1, ids), others, top, rest, how)


def _measured_near(near: Tensor, others: Tensor | None, top: Tensor, rest: Tensor, how: Comparison) -> Tensor:
    """The same. Args: near [N, k] and others [N, 1] the student's."""
    if how.rest == "renormalize":
        near, top = near - near.logsumexp(dim=-1, keepdim=True), top - top.logsumexp(dim=-1, keepdim=True)
    elif how.rest == "bucket" and others is not None:
        near, top = torch.cat([near, others], dim=-1), torch.cat([top, rest], dim=-1)
    found = _measured(near, top, how)
    # The sum over a part of two distributions may be negative.
    return found.clamp(min=0.0) if how.rest == "drop" else found


def _rest_of(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The log-prob of all tokens but these, [N, 1]."""
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)


def _measured(student: Tensor, teacher: Tensor, how: Comparison) -> Tensor:
    if how.min_logprob is not None:
        student, teacher = student.clamp(min=how.min_logprob), teacher.clamp(min=how.min_logprob)
    return how.divergence(student, teacher)
