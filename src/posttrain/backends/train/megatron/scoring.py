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
    logits = (hidden @ weight.T).float() / temperature
    first = group.rank() * len(weight)
    filling = max(0, first + len(weight) - vocabulary)
    if filling:
        real = torch.arange(len(weight), device=logits.device) < len(weight) - filling
        logits = torch.where(real, logits, -torch.inf)
    chosen, entropy, pi_squared = _Scores.apply(logits, targets - first, group, entropy_gradient)
    return TokenScores(logprobs=chosen, entropy=entropy, sum_pi_squared=pi_squared)


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
