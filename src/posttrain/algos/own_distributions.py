"""Scores of tokens that were drawn from distributions of their own: at other temperatures, or among the tokens a grammar left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.algos import logprobs
from posttrain.algos.fused_scoring import Head, TokenScores

ROWS = 256  # whose logits are in memory at a time; they are computed again for the backward pass


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """Compute the logits of all tokens, in float32 at least. Args: hidden [n, H]. Returns: [n, vocabulary]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ head.weight.to(wide).T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def score_own(
    inputs: Tensor,
    logits: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperatures: Tensor,
    which: Tensor,
    allowed: Tensor,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores of ``targets`` under softmax(logits / temperature) over the allowed tokens of each row.

    Gradients reach the inputs, and what ``logits`` reads, through the log-probs and, with ``entropy_gradient``, the entropy.

    Args: inputs [k, ...], of which ``logits`` makes those of some rows, [n, vocabulary]; targets, which [k] int64: the row of
        ``allowed`` that holds the row's tokens, -1 for all; temperatures [k] > 0; allowed [sets, width] bool, where tokens
        from width on are excluded.
    Returns: float32 scores (float64 for float64 logits); sum_pi_squared is among them.
    """

    def of(rows: Tensor, chosen: Tensor, temperature: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = logits(rows)
        scaled = found.to(torch.promote_types(found.dtype, torch.float32)) / temperature[:, None]
        width = min(scaled.shape[1], allowed.shape[1])
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        kept[:, :width] = allowed[places.clamp(min=0), :width]
        kept |= (places < 0)[:, None]
        log_p = scaled.masked_fill(~kept, -torch.inf).log_softmax(dim=1)
        # An excluded token adds nothing to the entropy, and 0 * -inf is NaN: also in its gradient.
        finite = torch.where(kept, log_p, 0.0)
        finite = finite if entropy_gradient else finite.detach()
        entropy = -(torch.where(kept, finite.exp(), 0.0) * finite).sum(dim=1)
        return logprobs.token_logprobs(log_p, chosen), entropy, logprobs.sum_pi_squared(log_p.detach())

    parts = [
        checkpoint(of, *each, use_reentrant=False)
        for each in zip(*(one.split(ROWS) for one in (inputs, targets, temperatures, which)), strict=True)
    ]
    chosen, entropies, squares = (torch.cat(each) for each in zip(*parts, strict=True))
    return TokenScores(logprobs=chosen, entropy=entropies, sum_pi_squared=squares)
