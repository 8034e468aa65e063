"""The divergence of a student from a teacher over the vocabulary, from hidden states, without keeping logits.

Logits exist for a block of rows at a time; the backward pass computes each block again. So a divergence is any formula of two
matrices of log-probabilities, and what it costs in memory is a block, whatever the length of the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.algos.distillation import Comparison, compare, compare_top
from posttrain.algos.fused_scoring import Head, head_logits
from posttrain.errors import ShapeError

BLOCK_VALUES = 1 << 25  # logits of a block, for each of the two models
# Logits that a formula reads at a time: on a CPU so few that its steps stay in the caches
PART_VALUES, PART_VALUES_CPU = 1 << 23, 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherStates:
    """A teacher that is computed beside the student."""

    hidden: Tensor  # [N, H'], at the same positions
    head: Head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The answer of a teacher that was computed before."""

    ids: Tensor  # [N, k] int64
    logprobs: Tensor  # [N, k] nats, of the whole distribution


Teacher = TeacherStates | TopTokens


def score_divergence(hidden: Tensor, head: Head, teacher: Teacher, how: Comparison) -> Tensor:
    """The divergence at N positions. Gradients reach hidden, weight and bias of the student.

    Where the vocabularies of student and teacher differ in size, the tokens beyond the smaller one, which only padding of the
    embeddings can be, are left out of both.

    Args: hidden [N, H] and head of the student.
    Returns: [N] nats, float32 (float64 for float64 inputs).
    """
    found: Tensor = _Divergence.apply(hidden, head.weight, head.bias, head, teacher, how)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, teacher: Teacher, how: Comparison
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.teacher, ctx.how = head, teacher, how
        # Made beforehand, so that large blocks follow one another in memory
        found = torch.empty(
            hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
        )
        for rows in _blocks(hidden, head):
            logits, theirs = head_logits(hidden[rows], head), _answer(teacher, rows)
            for part in _parts(logits):
                found[rows][part] = _measured(logits[part], theirs, part, how)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_divergence: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        head: Head = ctx.head
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=of_divergence.dtype) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=of_divergence.dtype) if for_bias else None
        for rows in _blocks(hidden, head):
            logits, theirs = head_logits(hidden[rows], head), _answer(ctx.teacher, rows)
            gradient = torch.empty_like(logits, dtype=hidden.dtype)
            for part in _parts(logits):
                found = _gradient(logits[part], theirs, part, ctx.how, of_divergence[rows][part], head)
                if grad_bias is not None:
                    grad_bias += found.sum(dim=0)
                gradient[part] = found
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.T @ hidden[rows]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _blocks(hidden: Tensor, head: Head) -> Iterator[slice]:
    size = max(1, BLOCK_VALUES // head.weight.shape[0])
    for start in range(0, hidden.shape[0], size):
        yield slice(start, start + size)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of a block that a formula reads at a time."""
    size = max(1, (PART_VALUES_CPU if logits.device.type == "cpu" else PART_VALUES) // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def _answer(teacher: Teacher, rows: slice) -> Tensor | TopTokens:
    """The teacher's logits of a block, or its most likely tokens there."""
    if isinstance(teacher, TopTokens):
        return TopTokens(ids=teacher.ids[rows], logprobs=teacher.logprobs[rows])
    return head_logits(teacher.hidden[rows], teacher.head)


def _measured(logits: Tensor, theirs: Tensor | TopTokens, part: slice, how: Comparison) -> Tensor:
    """The divergence at some rows of a block. Args: logits of these rows; theirs, of the block."""
    if isinstance(theirs, TopTokens):
        return compare_top(logits, top_ids=theirs.ids[part], top_logprobs=theirs.logprobs[part], how=how)
    return logits_divergence(logits, theirs[part], how)


def _gradient(
    logits: Tensor, theirs: Tensor | TopTokens, part: slice, how: Comparison, of_divergence: Tensor, head: Head
) -> Tensor:
    """The gradient in hidden @ weight.T + bias at some rows of a block."""
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(_measured(logits, theirs, part, how), logits, of_divergence)
    if head.softcap is not None:
        gradient = gradient * (1 - (logits.detach() / head.softcap).square())
    return gradient if head.scale == 1.0 else gradient * head.scale


@torch.no_grad()
def top_tokens(hidden: Tensor, head: Head, k: int, *, temperature: float, vocabulary: int | None = None) -> Tensor:
    """The k most likely tokens at N positions and their log-probs under softmax(logits / temperature).

    Args: hidden [N, H]; vocabulary, the first token id that is left out (None: all are kept).
    Returns: [N, 2, k] float32: ids, which float32 holds exactly below 2^24, and nats, most likely first.
    Raises: ShapeError when k is larger than the vocabulary.
    """
    found = torch.empty(hidden.shape[0], 2, k, device=hidden.device)
    size = max(1, BLOCK_VALUES // head.weight.shape[0])
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        logits = head_logits(hidden[rows], head)[:, :vocabulary]
        found[rows] = top_of_logits(logits, k, temperature=temperature)
    return found


@torch.no_grad()
def top_of_logits(logits: Tensor, k: int, *, temperature: float) -> Tensor:
    """``top_tokens`` from logits [N, vocabulary]."""
    if k > logits.shape[-1]:
        raise ShapeError(f"the top {k} of a vocabulary of {logits.shape[-1]} tokens")
    top = (logits.float() / temperature).log_softmax(dim=-1).topk(k, dim=-1)
    return torch.stack([top.indices.float(), top.values], dim=1)


def logits_divergence(logits: Tensor, teacher_logits: Tensor, how: Comparison) -> Tensor:
    """``compare`` over the tokens that both vocabularies have, see score_divergence."""
    tokens = min(logits.shape[-1], teacher_logits.shape[-1])
    return compare(logits[..., :tokens], teacher_logits[..., :tokens], how)
