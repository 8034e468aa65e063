"""Log-prob and entropy of tokens with a vocabulary sharded over tensor-parallel ranks (arXiv:1909.08053, section 3).

Each rank multiplies the hidden states with its shard of the head; the sums of softmax are reduced over the ranks, a few numbers
per token instead of its logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.algos.fused_scoring import TokenScores
from posttrain.errors import ShapeError


def score_cut(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    group: dist.ProcessGroup,
    temperature: float,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Score ``targets`` under softmax(hidden @ weight.T / temperature) over all shards, the same on every rank.

    Args: hidden [N, H], the same on every rank; weight [V / R, H], the rank's shard, whose rows past ``vocabulary`` are
        padding; targets [N] int64.
    Gradients reach hidden and weight; that of hidden is a summand, to be reduced over the group by the caller.
    """
    logits, first = _own_logits(hidden, weight, vocabulary, group, temperature)
    chosen, entropy, pi_squared = _Scores.apply(logits, targets - first, group, entropy_gradient)
    return TokenScores(logprobs=chosen, entropy=entropy, sum_pi_squared=pi_squared)


def score_top(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, vocabulary: int, group: dist.ProcessGroup, temperature: float
) -> tuple[Tensor, Tensor]:
    """Score the tokens ``ids`` [N, k], different ones in a row, under the same distribution; args and gradients as of score_cut.

    Returns: their log-probs [N, k], and the log-prob [N, 1] of all others together, -inf where there are none; nats.
    """
    logits, first = _own_logits(hidden, weight, vocabulary, group, temperature)
    near, others = _TopScores.apply(logits, ids - first, group)
    return near, others


@torch.no_grad()
def top_of_cut(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    vocabulary: int,
    group: dist.ProcessGroup,
    temperature: float,
    known: int | None = None,
) -> Tensor:
    """Find the k most likely tokens below ``known`` (None: of all), the same on every rank; args as of score_cut.

    Returns: [N, 2, k] float32, as of algos.fused_divergence.top_tokens.
    Raises: ShapeError when there are fewer tokens.
    """
    vocabulary = min(vocabulary, known or vocabulary)
    if k > vocabulary:
        raise ShapeError(f"the top {k} of a vocabulary of {vocabulary} tokens")
    logits, first = _own_logits(hidden, weight, vocabulary, group, temperature)
    total = _log_total(logits, group)
    own = logits.topk(min(k, logits.shape[1]), dim=1)
    mine = torch.full((logits.shape[0], 2, k), -torch.inf, device=logits.device)
    mine[:, 0, : own.indices.shape[1]] = (own.indices + first).float()
    mine[:, 1, : own.values.shape[1]] = own.values - total[:, None]
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    ids, values = torch.cat(everyone, dim=2).unbind(dim=1)
    top = values.topk(k, dim=1)
    return torch.stack([ids.gather(1, top.indices), top.values], dim=1)


def _own_logits(
    hidden: Tensor, weight: Tensor, vocabulary: int, group: dist.ProcessGroup, temperature: float
) -> tuple[Tensor, int]:
    """The rank's logits [N, V / R] float32, -inf at padding, and the token id of the first."""
    logits = (hidden @ weight.T).float() / temperature
    first = group.rank() * len(weight)
    filling = min(len(weight), max(0, first + len(weight) - vocabulary))
    if filling:
        real = torch.arange(len(weight), device=logits.device) < len(weight) - filling
        logits = torch.where(real, logits, -torch.inf)
    return logits, first


def _log_total(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log of the sum over all ranks' tokens of exp(logits), [N]."""
    largest = logits.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (logits - largest[:, None]).exp().sum(dim=1)
    dist.all_reduce(total, group=group)
    return total.log() + largest


class _TopScores(torch.autograd.Function):
    """log p of k tokens, and of all others: with a [N, k] and b [N] the incoming gradients, p their softmax and R the sum of exp
    over the others, d/dx_j = a_j - (sum of a + b) p_j + b exp(x_j) / R, the first at the k tokens, the last at the others."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x = logits - largest[:, None]
        here = (places >= 0) & (places < logits.shape[1])
        inside = places.clamp(0, logits.shape[1] - 1)
        others = x.exp()
        # A place of another rank leaves this rank's tokens as they are
        kept = torch.ones_like(others).scatter_reduce(1, inside, (~here).float(), "amin")
        sums = torch.stack([others.sum(dim=1), (others * kept).sum(dim=1)], dim=1)
        chosen = torch.where(here, x.gather(1, inside), 0.0)
        joined = torch.cat([sums, chosen], dim=1)
        dist.all_reduce(joined, group=group)
        log_total, log_rest = joined[:, 0].log(), joined[:, 1].log()
        ctx.save_for_backward(x, log_total, log_rest, inside, here, kept)
        return joined[:, 2:] - log_total[:, None], (log_rest - log_total)[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_near: Tensor, of_others: Tensor) -> tuple[Tensor, None, None]:
        x, log_total, log_rest, inside, here, kept = ctx.saved_tensors
        p = (x - log_total[:, None]).exp()
        gradient = -p * (of_near.sum(dim=1, keepdim=True) + of_others)
        gradient.scatter_add_(1, inside, torch.where(here, of_near, 0.0))
        of_rest = torch.where(kept > 0, (x - log_rest[:, None]).exp(), 0.0)
        return gradient + of_others * of_rest, None, None


class _Scores(torch.autograd.Function):
    """Scores as in algos.fused_scoring: d/dx_j = a (1[j is the target] - p_j) - b p_j (log p_j + entropy), with a, b the incoming
    gradients of log-prob and entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, places: Tensor, group: dist.ProcessGroup, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x = logits - largest[:, None]
        e = x.exp()
        here = (places >= 0) & (places < logits.shape[1])
        inside = places.clamp(0, logits.shape[1] - 1)
        chosen = torch.where(here, x.gather(1, inside[:, None])[:, 0], 0.0)
        product = torch.where(e > 0, e * x, 0.0).sum(dim=1)  # padding is -inf, and 0 * -inf would be NaN
        sums = torch.stack([e.sum(dim=1), product, e.square().sum(dim=1), chosen])
        dist.all_reduce(sums, group=group)
        total, product, square, chosen = sums.unbind()
        log_total = total.log()
        entropy = log_total - product / total
        ctx.save_for_backward(x, log_total, entropy, inside, here)
        ctx.set_materialize_grads(False)
        pi_squared = square / total.square()
        ctx.mark_non_differentiable(pi_squared, *(() if entropy_gradient else (entropy,)))
        return chosen - log_total, entropy, pi_squared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, _: None
    ) -> tuple[Tensor, None, None, None]:
        x, log_total, entropy, inside, here = ctx.saved_tensors
        log_p = x - log_total[:, None]
        p = log_p.exp()
        gradient = torch.zeros_like(p)
        if of_logprobs is not None:
            gradient = -p * of_logprobs[:, None]
            gradient.scatter_add_(1, inside[:, None], torch.where(here, of_logprobs, 0.0)[:, None])
        if of_entropy is not None:
            gradient -= torch.where(p > 0, of_entropy[:, None] * p * (log_p + entropy[:, None]), 0.0)
        return gradient, None, None, None
