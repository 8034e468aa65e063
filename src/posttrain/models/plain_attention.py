"""Attention inside buckets by matrix products, with an explicit backward pass: the fastest way on a CPU while the score
matrices fit in its caches.

All tensors have the order [groups, kv_heads, members, shared, L], so that each product is one batch of matrices: query heads
that share a key head, and members of a group that share a prompt, are rows of one matrix. One gather brings tokens into that
order, one brings them back, without copies in between. With weights W = softmax(scaling Q K'), O = W V and an incoming
gradient dO: dW = dO V', dS = scaling (dW W - W rowsum(dW W)), dQ = dS K, dK = dS' Q, dV = W' dO (arXiv:2205.14135, appendix B.2;
its rowsum(dO O) is the same number, but less precise with outputs rounded to bfloat16). With a soft cap c, scores x become
c tanh(x / c), and dS is multiplied by its slope 1 - tanh(x / c)^2. With a sink s per head (gpt-oss), a score that no token has
and that adds nothing to the output, W is multiplied by 1 - U with U = exp(s) / (exp(s) + sum exp(x)), and ds is the sum of
-U rowsum(dW W) over the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.buckets import Bucket


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketRows:
    """Row indices of one bucket: G groups of M sequences of up to L tokens, after prompts of up to P (0 without)."""

    groups: int
    members: int
    length: int
    prefix: int
    queries: Tensor  # [G * kv * M * shared * L] int64: source row in [tokens * heads]; padding repeats a neighbour
    keys: Tensor  # [G * kv * M * L] int64: source row in [tokens * kv_heads]
    prefix_keys: Tensor | None  # [G * kv * P] int64: source row in [tokens * kv_heads]
    prefix_tokens: Tensor | None  # [m] int64: tokens of prompts
    prefix_places: Tensor | None  # [m * kv] int64: positions of their keys in [G * kv * P]

    def own(self, rows: Tensor) -> Tensor:
        """Reshape to [G * kv * M, -1, last]: a matrix per sequence and key head."""
        return rows.view(len(self.keys) // self.length, -1, rows.shape[-1])

    def together(self, rows: Tensor) -> Tensor:
        """Reshape to [G * kv, -1, last]: a matrix per prompt and key head, for all sequences that share it."""
        return rows.view(len(self.keys) // (self.length * self.members), -1, rows.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Indices between a row's tokens and the buckets, for given numbers of heads; shared by all layers."""

    parts: tuple[BucketRows, ...]
    # [n] int64: the query tokens, in the order of the output; None: all tokens of the row, in order.
    tokens: Tensor | None
    queries: Tensor  # [n * heads] int64: positions in the buckets' queries, concatenated
    keys: Tensor  # [n * kv_heads] int64: positions in the buckets' keys, concatenated


def places_of(buckets: Sequence[Bucket], heads: int, kv_heads: int, order: Tensor | None) -> Places:
    """Compute the indices. Args: order [n] maps the buckets' concatenated tokens to the output's order; None keeps theirs."""
    parts = tuple(_part(bucket, heads, kv_heads) for bucket in buckets)
    shared = heads // kv_heads
    tokens, queries, keys = [], [], []
    query_starts = accumulate((len(part.queries) for part in parts), initial=0)
    key_starts = accumulate((len(part.keys) for part in parts), initial=0)
    for bucket, part, query_start, key_start in zip(buckets, parts, query_starts, key_starts, strict=False):
        tokens.append(bucket.tokens)
        group, rest = bucket.places // (part.members * part.length), bucket.places % (part.members * part.length)
        member, place = (rest // part.length)[:, None], (rest % part.length)[:, None]
        head = torch.arange(kv_heads, device=bucket.places.device)
        row = (group[:, None] * kv_heads + head) * part.members + member  # [n, kv_heads]
        keys.append(row * part.length + place + key_start)
        # [n, kv_heads, shared]
        each = row[..., None] * shared + torch.arange(shared, device=row.device)
        queries.append((each * part.length + place[..., None]).flatten(1) + query_start)
    found = [torch.cat(index) for index in (tokens, queries, keys)]
    if order is not None:
        found = [index[order] for index in found]
    asking = None if order is not None else found[0]
    return Places(parts=parts, tokens=asking, queries=found[1].flatten(), keys=found[2].flatten())


def _part(bucket: Bucket, heads: int, kv_heads: int) -> BucketRows:
    prefix = bucket.prefix
    groups = prefix.visible.shape[0] if prefix is not None else 1
    members, length, shared = bucket.rows // groups, bucket.length, heads // kv_heads
    device = bucket.tokens.device
    head = torch.arange(heads, device=device).view(kv_heads, 1, shared, 1)
    kv_head = torch.arange(kv_heads, device=device).view(kv_heads, 1, 1)
    token = _filled(bucket.tokens, bucket.places, bucket.rows * length).view(groups, 1, members, length)
    prefix_keys = prefix_places = None
    if prefix is not None:
        # Its padding is on the left, so filling runs from the right.
        size = groups * prefix.length
        before = _filled(prefix.tokens.flip(0), size - 1 - prefix.places.flip(0), size).flip(0)
        before = before.view(groups, 1, prefix.length)
        prefix_keys = (before * kv_heads + kv_head.view(kv_heads, 1)).flatten()
        group, place = prefix.places // prefix.length, prefix.places % prefix.length
        each_head = group[:, None] * kv_heads + kv_head.flatten()
        prefix_places = (each_head * prefix.length + place[:, None]).flatten()
    return BucketRows(
        groups=groups,
        members=members,
        length=length,
        prefix=prefix.length if prefix is not None else 0,
        queries=(token[:, :, :, None] * heads + head).flatten(),
        keys=(token * kv_heads + kv_head).flatten(),
        prefix_keys=prefix_keys,
        prefix_tokens=prefix.tokens if prefix is not None else None,
        prefix_places=prefix_places,
    )


def _filled(tokens: Tensor, places: Tensor, size: int) -> Tensor:
    """Return the token for every place [size]; padding repeats the previous token of the same sequence, so that non-finite
    values stay in their sequence. Weights there are 0, and so are gradients."""
    number = torch.full((size,), -1, dtype=torch.int64, device=tokens.device)
    number[places] = torch.arange(len(tokens), device=tokens.device)
    return tokens[number.cummax(0).values.clamp(min=0)]


def attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Places,
    biases: Sequence[Tensor],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scaling q k' + bias) v for the tokens of ``places``, with scores capped where softcap is given.

    Args: query [N, heads, D]; key, value [N or more, kv_heads, D]; biases: for each part [G or 1, L, P + L] float32, 0 or -inf;
        sinks [heads].
    Returns: [n, heads, D], in the order of ``places.tokens``.
    """
    output: Tensor = _AttendPlain.apply(query, key, value, places, tuple(biases), scaling, softcap, sinks)
    return output


class _AttendPlain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Places,
        biases: tuple[Tensor, ...],
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        heads, dim = query.shape[1:]
        kept: list[Tensor | None] = []
        outputs = []
        for part, bias in zip(places.parts, biases, strict=True):
            q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
            kp, vp = (None if part.prefix_keys is None else _rows(each, part.prefix_keys) for each in (key, value))
            weights, slope, of_sink = _weights(part, q, k, kp, bias, scaling, softcap, sinks)
            rounded = weights.to(q.dtype)
            output = (part.own(rounded[..., part.prefix :]) @ part.own(v)).view(-1, dim)
            if vp is not None:
                output += (part.together(rounded[..., : part.prefix]) @ part.together(vp)).view(-1, dim)
            outputs.append(output)
            kept += [q, k, v, kp, vp, weights, slope, of_sink]
        ctx.save_for_backward(*kept)
        ctx.places, ctx.scaling = places, scaling
        ctx.sizes, ctx.sinks_dtype = (query.shape, key.shape), None if sinks is None else sinks.dtype
        return _joined(outputs).index_select(0, places.queries).view(-1, heads, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places, scaling = ctx.places, ctx.scaling
        dim = grad.shape[-1]
        kept = iter(ctx.saved_tensors)
        grads: list[list[Tensor]] = [[], [], []]
        prompts: list[tuple[BucketRows, Tensor, Tensor]] = []
        grad_sinks = None
        # The incoming gradient in the order of the buckets, 0 in the padding.
        incoming = grad.new_zeros(sum(len(part.queries) for part in places.parts), dim)
        incoming.index_copy_(0, places.queries, grad.reshape(-1, dim))
        for part, of_output in zip(
            places.parts, incoming.split([len(part.queries) for part in places.parts]), strict=True
        ):
            q, k, v, kp, vp, weights, capped, of_sink = (next(kept) for _ in range(8))
            rounded = weights.to(q.dtype)
            of_own, own = part.own(of_output), part.own(weights[..., part.prefix :])
            product = _as_precise(of_own @ part.own(v).transpose(1, 2), own)  # dW * W
            total = product.sum(dim=-1, keepdim=True).view(-1, 1)
            grads[2].append((part.own(rounded[..., part.prefix :]).transpose(1, 2) @ of_own).view(-1, dim))
            if kp is not None:
                of_all, shown = part.together(of_output), part.together(weights[..., : part.prefix])
                of_prompt = _as_precise(of_all @ part.together(vp).transpose(1, 2), shown)
                total += of_prompt.sum(dim=-1, keepdim=True).view(-1, 1)
                of_prompt.addcmul_(shown, part.together(total), value=-1)
                if capped is not None:
                    of_prompt.mul_(part.together(capped[..., : part.prefix]))
                slope = of_prompt.to(q.dtype)
                before = (slope @ part.together(kp)).view(-1, dim)
                grad_kp = (slope.transpose(1, 2) @ part.together(q)).mul_(scaling).view(-1, dim)
                grad_vp = (part.together(rounded[..., : part.prefix]).transpose(1, 2) @ of_all).view(-1, dim)
                prompts.append((part, grad_kp, grad_vp))
            if of_sink is not None:
                here = (total.view_as(of_sink) * of_sink).sum(dim=(0, 2, 4, 5)).flatten()
                grad_sinks = -here if grad_sinks is None else grad_sinks - here
            product.addcmul_(own, part.own(total), value=-1)
            if capped is not None:
                product.mul_(part.own(capped[..., part.prefix :]))
            slope = product.to(q.dtype)
            grad_q = (slope @ part.own(k)).view(-1, dim)
            if kp is not None:
                grad_q += before
            grads[1].append((slope.transpose(1, 2) @ part.own(q)).mul_(scaling).view(-1, dim))
            grads[0].append(grad_q.mul_(scaling))
        query_size, key_size = ctx.sizes
        grad_query = _returned(grads[0], places.queries, places.tokens, query_size)
        grad_key, grad_value = (_returned(each, places.keys, places.tokens, key_size) for each in grads[1:])
        for part, *of_prompts in prompts:
            assert part.prefix_places is not None
            for whole, of_prompt in zip((grad_key, grad_value), of_prompts, strict=True):
                added = of_prompt.index_select(0, part.prefix_places).view(-1, *whole.shape[1:])
                # A token stands in one prompt of a bucket
                whole[part.prefix_tokens] = whole[part.prefix_tokens] + added
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(ctx.sinks_dtype)
        return grad_query, grad_key, grad_value, None, None, None, None, grad_sinks


def _weights(
    part: BucketRows,
    q: Tensor,
    k: Tensor,
    kp: Tensor | None,
    bias: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return [G, kv, M, shared, L, P + L] in float32 at least: rounding to bfloat16 would add a fifth to the gradients' error.
    And, with a cap, its slope at every score; with sinks, the weight of the sink, [G, kv, M, shared, L, 1]."""
    kv_heads = len(part.keys) // (part.groups * part.members * part.length)
    shape = part.groups, kv_heads, part.members, -1, part.length
    own = (part.own(q) @ part.own(k).transpose(1, 2)).view(*shape, part.length)
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.empty(*own.shape[:-1], part.prefix + part.length, dtype=exact, device=q.device)
    scores[..., part.prefix :] = own
    if kp is not None:
        scores[..., : part.prefix] = (part.together(q) @ part.together(kp).transpose(1, 2)).view(*shape, part.prefix)
    slope = None
    if softcap is None:
        torch.add(bias[:, None, None, None], scores, alpha=scaling, out=scores)
    else:
        bent = scores.mul_(scaling / softcap).tanh_()
        slope = 1 - bent.square()
        torch.add(bias[:, None, None, None], bent, alpha=softcap, out=scores)
    weights = scores.softmax(dim=-1)
    if sinks is None:
        return weights, slope, None
    of_sink = (sinks.to(exact).view(1, kv_heads, 1, -1, 1, 1) - scores.logsumexp(dim=-1, keepdim=True)).sigmoid_()
    return weights.mul_(1 - of_sink), slope, of_sink


def _as_precise(rounded: Tensor, weights: Tensor) -> Tensor:
    """Multiply in the dtype of the weights: a product of two dtypes takes up to four times as long on a CPU."""
    return rounded.to(weights.dtype).mul_(weights)


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """Gather [tokens, heads, D] to [len(index), D]."""
    return states.reshape(-1, states.shape[-1]).index_select(0, index)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _returned(parts: list[Tensor], index: Tensor, tokens: Tensor | None, size: torch.Size) -> Tensor:
    """Scatter gradients from the order of the buckets to that of the row, 0 for tokens in none of them."""
    rows = _joined(parts).index_select(0, index).view(-1, *size[1:])
    if tokens is None and len(rows) == size[0]:
        return rows
    whole = rows.new_zeros(size)
    whole[slice(len(rows)) if tokens is None else tokens] = rows
    return whole
