"""Log-prob, entropy and KL of tokens from hidden states, without ever holding the logits of all the vocabulary.

The language-model head is multiplied tile by tile over the vocabulary; what softmax needs is summed up on the way. The largest
thing in memory is one tile, [N, 2048], instead of several matrices [N, vocabulary]. The backward pass computes each tile
again, by one more product with the head, except for those that a CPU keeps: as many as KEPT_BYTES hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.algos import logprobs
from posttrain.algos.exact_products import (
    add_product,
    add_to,
    close_product,
    exact_product,
    turned_product,
    widens,
    with_ones,
    with_shift,
)
from posttrain.algos.kl_full import vocabulary_kl
from posttrain.errors import ShapeError
from posttrain.libraries.cpu_kernels.load import kernels_for

COLUMNS = 2048  # of a tile: on a CPU small enough for its caches, on any device wide enough for fast products

KEPT_BYTES = 1 << 29  # of tiles for the backward pass, where compiled kernels read them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """logits = scale * (hidden @ weight.T + bias), then softcap * tanh(logits / softcap) where there is a softcap."""

    weight: Tensor  # [vocabulary, H]
    bias: Tensor | None = None  # [vocabulary]
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Scores of N drawn tokens, each [N]."""

    logprobs: Tensor  # nats
    entropy: Tensor  # nats, of the whole distribution
    sum_pi_squared: Tensor | None = None  # in (0, 1], see algos.logprobs; None: not asked for; never carries gradient
    full_kl: Tensor | None = None  # nats, KL(policy || reference) over the whole vocabulary; None without a reference
    divergence: Tensor | None = None  # nats, from the teachers (algos.fused_divergence); None: not asked for


def score_tokens(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference: tuple[Tensor, Head] | None = None,
) -> TokenScores:
    """Scores of ``targets`` under softmax(logits / temperature).

    Gradients reach hidden, weight and bias, through the log-probs, the KL and, with ``entropy_gradient``, the entropy. Sums
    run in float32 at least. bfloat16 inputs are multiplied exactly and added up in float32: their logits are not rounded to
    bfloat16, as the model's own forward pass would. Without a reference, they are rounded less where that is faster: by
    ``close_product``, or (``_rounds``) by rounding each logit's distance to the target's, which is small for every token that is
    about as likely as the target. Gradients are rounded to the dtype of what they belong to.

    Args: hidden [N, H]; targets [N] int64; temperature > 0; reference: hidden states [N, H'] and head of another model over
        the same vocabulary, which get no gradient.
    Returns: float32 scores (float64 for float64 inputs); NaN where the hidden state is not finite, and the
        log-prob of a token that is not in the vocabulary.
    Raises: ShapeError when the vocabularies differ.
    """
    if reference is not None and reference[1].weight.shape[0] != head.weight.shape[0]:
        raise ShapeError(
            f"vocabularies differ: policy {head.weight.shape[0]} tokens, reference {reference[1].weight.shape[0]}"
        )
    keeps = torch.is_grad_enabled()
    chosen, entropies, pi_squared, kl = _ScoreTokens.apply(
        hidden, head.weight, head.bias, targets, head, temperature, entropy_gradient, sum_pi_squared, reference, keeps
    )
    return TokenScores(logprobs=chosen, entropy=entropies, sum_pi_squared=pi_squared, full_kl=kl)


def score_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference_logits: Tensor | None = None,
) -> TokenScores:
    """The same from logits [N, vocabulary], by the plain formulas: for models whose head is not a ``Head``, and to compare."""
    log_p = logprobs.log_probabilities(logits, temperature)
    kl = None
    if reference_logits is not None:
        kl = vocabulary_kl(log_p, logprobs.log_probabilities(reference_logits.detach(), temperature))
    return TokenScores(
        logprobs=logprobs.token_logprobs(log_p, targets),
        entropy=logprobs.entropy(log_p if entropy_gradient else log_p.detach()),
        sum_pi_squared=logprobs.sum_pi_squared(log_p.detach()) if sum_pi_squared else None,
        full_kl=kl,
    )


class _ScoreTokens(torch.autograd.Function):
    """Scores of drawn tokens. With x the logits / temperature, log p = x - logsumexp(x), and incoming gradients a, b, c of
    log-prob, entropy, KL:

    d/dx_j = a (1[j is the target] - p_j) - b p_j (log p_j + entropy) + c p_j (log p_j - log q_j - KL).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        entropy_gradient: bool,
        wants_sum_pi_squared: bool,
        reference: tuple[Tensor, Head] | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        targets = targets.contiguous()
        keeps = keeps and any(ctx.needs_input_grad)
        kept: dict[int, Tensor] = {}
        # Per tile: its largest x, and sums of e, e x, e^2 and e (x - y), with e = exp(x) and x, y less their tile's largest.
        # Written into tensors made beforehand: small ones made between the large tiles would leave holes too small for them.
        tiles, rows = -(-weight.shape[0] // COLUMNS), hidden.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        top, total, product, square, ref_top, ref_total, difference = torch.empty(
            (7, tiles, rows), dtype=dtype, device=hidden.device
        )
        chosen = torch.full((rows,), torch.nan, dtype=dtype, device=hidden.device)
        shifted = _rounds(hidden, head) and reference is None
        if shifted:
            keeps = keeps and not entropy_gradient  # of which the gradient is computed from exact tiles
            factor = head.scale / temperature
            inside = weight[targets.clamp(0, len(weight) - 1)]
            of_target = torch.linalg.vecdot(hidden.float(), inside.float())
            less_target = with_shift(hidden, of_target)
        for number in range(tiles):
            x = (
                less_target @ with_ones(weight[_columns(number)]).T
                if shifted
                else _tile(hidden, head, temperature, number, exact=reference is not None)
            )
            kernels = kernels_for(x) if reference is None else None
            if kernels is not None:
                of_squares = square[number] if wants_sum_pi_squared else None
                sums = top[number], total[number], product[number], of_squares
                kernels.tile_forward(x, factor if shifted else 1.0, targets, number * COLUMNS, chosen, sums)
                if keeps and (number + 1) * x.nbytes <= KEPT_BYTES:
                    kept[number] = x
                continue
            if shifted:
                x = x.float() if factor == 1.0 else x.float().mul_(factor)
            places, here = _places(targets, number, x)
            torch.where(here, x.gather(1, places).squeeze(1), chosen, out=chosen)
            top[number] = x.amax(dim=1)
            e = x.sub_(top[number, :, None]).exp()
            total[number] = e.sum(dim=1)
            product[number] = torch.linalg.vecdot(e, x)
            if wants_sum_pi_squared:
                square[number] = torch.linalg.vecdot(e, e)
            if reference is not None:
                y = _tile(reference[0], reference[1], temperature, number)
                ref_top[number] = y.amax(dim=1)
                y.sub_(ref_top[number, :, None])
                difference[number] = torch.linalg.vecdot(e, x.sub_(y))
                ref_total[number] = y.exp_().sum(dim=1)
                del y
            del x, e
        largest, rest = _logsumexp(top, total)
        below = largest - top + rest  # logsumexp(x) - largest of the tile, at least 0
        share = (-below).exp()
        # Sums of terms that are not negative: an entropy near 0 keeps its digits.
        entropies = (share * (below * total - product)).sum(dim=0)
        pi_squared = (share.square() * square).sum(dim=0) if wants_sum_pi_squared else None
        kl = ref_lse = None
        if reference is not None:
            ref_largest, ref_rest = _logsumexp(ref_top, ref_total)
            ref_lse = ref_largest + ref_rest
            shift = (ref_largest - ref_top + ref_rest) - below
            kl = (share * (difference + total * shift)).sum(dim=0)
        scores = (chosen - largest) - rest
        above = largest + rest  # logsumexp(x); of the distances to the target's, where those are multiplied
        lse = above + of_target * factor if shifted else above
        ctx.save_for_backward(hidden, weight, bias, targets, scores, lse, above, entropies, kl, ref_lse)
        ctx.head, ctx.temperature, ctx.reference, ctx.kept = head, temperature, reference, kept
        ctx.set_materialize_grads(False)
        without_gradient = [pi_squared, None if entropy_gradient else entropies]
        ctx.mark_non_differentiable(*(output for output in without_gradient if output is not None))
        return scores, entropies, pi_squared, kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, _: None, of_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scores, lse, above, entropies, kl, ref_lse = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        of_logprobs = torch.zeros_like(lse) if of_logprobs is None else of_logprobs
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        if _rounds(hidden, head) and of_entropy is None and of_kl is None:
            factor = head.scale / temperature
            grads = _rounding_gradients(
                hidden, weight, targets, scores, lse, of_logprobs, factor, (for_hidden, for_weight), ctx.kept, above
            )
            return *grads, None, None, None, None, None, None, None, None
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        times_hidden = None
        for number in range(-(-weight.shape[0] // COLUMNS)):
            tile = _columns(number)
            x = ctx.kept.pop(number, None)  # not for a second backward pass: it is written over
            if x is None or x.dtype != lse.dtype:
                x = _tile(hidden, head, temperature, number, exact=ctx.reference is not None)
            kernels = kernels_for(x) if of_kl is None and head.softcap is None else None
            if kernels is not None:
                at_target = -of_logprobs * scores.expm1()
                if of_entropy is not None:
                    at_target -= of_entropy * scores.exp() * (scores + entropies)
                kernels.tile_backward(
                    x,
                    1.0,
                    targets,
                    number * COLUMNS,
                    shift=lse,
                    of_logprobs=of_logprobs.contiguous(),
                    of_entropy=None if of_entropy is None else of_entropy.contiguous(),
                    entropies=entropies,
                    at_target=at_target.mul_(head.scale / temperature),
                    by=head.scale / temperature,
                )
                gradient = x
            else:
                slope = None if head.softcap is None else 1 - (x * (temperature / head.softcap)).square()
                x.sub_(lse[:, None])  # log p
                factor = of_logprobs[:, None]  # gradient = -p * factor, and a at the target
                if of_entropy is not None:
                    factor = factor + of_entropy[:, None] * (x + entropies[:, None])
                if of_kl is not None:
                    ref_hidden, ref_head = ctx.reference
                    log_q = _tile(ref_hidden, ref_head, temperature, number).sub_(ref_lse[:, None])
                    factor = factor - of_kl[:, None] * (x - log_q - kl[:, None])
                gradient = x.exp_().mul_(factor).neg_()
                places, here = _places(targets, number, x)
                gradient.scatter_add_(1, places, torch.where(here, of_logprobs, 0.0)[:, None])
                if slope is not None:
                    gradient.mul_(slope)
                if head.scale != temperature:
                    gradient.mul_(head.scale / temperature)
            if grad_bias is not None:
                grad_bias[tile] = gradient.sum(dim=0)
            if widens(hidden):
                if grad_hidden is not None:
                    add_product(grad_hidden, gradient, weight[tile])
                if grad_weight is not None:
                    times_hidden = times_hidden or turned_product(hidden)
                    grad_weight[tile] = times_hidden(gradient)
                del x, gradient
                continue
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                add_to(grad_hidden, gradient @ weight[tile])
            if grad_weight is not None:
                torch.mm(gradient.T, hidden, out=grad_weight[tile])
            del x, gradient
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None


def _rounding_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scores: Tensor,
    lse: Tensor,
    of_logprobs: Tensor,
    factor: float,
    wanted: tuple[bool, bool],
    kept: dict[int, Tensor],
    above: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight through the log-probs of bfloat16 inputs on a CPU, by products that round to bfloat16.

    Rounded logits x would be off by up to 2^-9 |x|, and p by as much of itself. So the product gives log p at once, with
    logsumexp as its shift, and log p is off by 2^-9 |log p| only, which is least where p is large. The tiles of distances to the
    target's logit that the forward pass kept are off by 2^-9 of such a distance. At the target the gradient a (1 - p) comes
    from the log-prob in ``scores``, unrounded.

    Args: as in the backward pass; factor: x = factor * hidden @ weight.T; scores, lse, of_logprobs [N]; kept: tiles by number,
        which are written over; above [N]: the logsumexp of their distances times factor.
    """
    left = with_shift(hidden, lse / factor)
    of_logprobs = of_logprobs.contiguous()
    elsewhere, at_target = (-factor * of_logprobs)[:, None], -factor * of_logprobs * scores.expm1()
    grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if wanted[0] else None
    grad_weight = torch.empty_like(weight) if wanted[1] else None
    for number in range(-(-weight.shape[0] // COLUMNS)):
        part = weight[_columns(number)]
        tile = kept.pop(number, None)
        log_p = left @ with_ones(part).T if tile is None else tile
        kernels = kernels_for(log_p)
        if kernels is not None:
            kernels.tile_backward(
                log_p,
                factor,
                targets,
                number * COLUMNS,
                shift=None if tile is None else above,
                of_logprobs=of_logprobs,
                of_entropy=None,
                entropies=scores,
                at_target=at_target,
                by=factor,
            )
            gradient = log_p
        else:
            gradient = (log_p if factor == 1.0 else log_p.mul_(factor)).exp_().mul_(elsewhere)
            places, here = _places(targets, number, gradient)
            known = gradient.gather(1, places)
            gradient.scatter_(1, places, torch.where(here[:, None], at_target[:, None].bfloat16(), known))
        if grad_hidden is not None:
            add_to(grad_hidden, gradient @ part)
        if grad_weight is not None:
            torch.mm(gradient.T, hidden, out=grad_weight[_columns(number)])
        del log_p, gradient, tile
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def _rounds(hidden: Tensor, head: Head) -> bool:
    """Return True when products may round to bfloat16, because a shift makes the rounded part small. On most CPUs they take
    half the time of exact ones."""
    is_bfloat16 = hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
    return is_bfloat16 and not widens(hidden) and head.bias is None and head.softcap is None


def _columns(number: int) -> slice:
    return slice(number * COLUMNS, (number + 1) * COLUMNS)


def _tile(hidden: Tensor, head: Head, temperature: float, number: int, *, exact: bool = True) -> Tensor:
    """logits / temperature of one tile, [N, COLUMNS or fewer]; free to be written over."""
    product = exact_product if exact else close_product
    x = product(hidden, head.weight[_columns(number)].T)
    if head.bias is not None:
        x.add_(head.bias[_columns(number)])
    if head.softcap is not None:
        return x.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / temperature)
    return x if head.scale == temperature else x.mul_(head.scale / temperature)


@torch.no_grad()
def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """The logits [N, vocabulary] of all tokens, in float32 at least. No gradient."""
    if hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu":
        # Tile by tile, since exact_product copies what it multiplies: a copy of the whole head would leave the caches.
        whole = torch.empty(hidden.shape[0], head.weight.shape[0])
        for number in range(-(-head.weight.shape[0] // COLUMNS)):
            whole[:, _columns(number)] = _tile(hidden, head, 1.0, number)
        return whole
    logits = exact_product(hidden, head.weight.T)
    if head.bias is not None:
        logits.add_(head.bias)
    if head.softcap is not None:
        return logits.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap)
    return logits if head.scale == 1.0 else logits.mul_(head.scale)


def _places(targets: Tensor, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The targets' columns in a tile, [N, 1], any column for those elsewhere; and who is here, [N] bool."""
    places = targets - number * COLUMNS
    return places.clamp(0, x.shape[1] - 1)[:, None], (places >= 0) & (places < x.shape[1])


def _logsumexp(tops: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """log of the sum of sums * exp(tops) over the tiles [tiles, N], as the largest top and what is above it, both [N]."""
    largest = tops.amax(dim=0)
    return largest, ((tops - largest).exp() * sums).sum(dim=0).log()
