"""Attention over sequences packed in one row, some of which follow a prompt that they share.

Sequences of similar length are processed together, in buckets that pad them to the longest: the only padding, and only inside
attention. A response with a shared prompt attends to all of that prompt's keys and, causally, its own; the prompt's keys and
values are computed once and never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from posttrain.libraries.cpu_kernels.attention import Settings
from posttrain.libraries.cpu_kernels.load import attention_for
from posttrain.models.buckets import Bucket, Prefix
from posttrain.models.plain_attention import Places, attend_plain, places_of

# Bounds of a bucket: the excess size of its score matrices, and the number of scores per head.
WASTE = 1.25
MAX_SCORES = 1 << 22
# On a CPU without compiled attention, plain matrix products are faster than torch's flash kernel while score matrices fit in
# cache: with 64 sequences of 68 tokens (9 heads of 64, bfloat16, 2 threads) forward and backward took 15 ms against 59 ms.
# Memory grows with length^2.
LONGEST_PLAIN = 1024
# Without gradients the fused kernel is ahead sooner, where it needs no mask: a pass of 512 tokens takes half the time.
LONGEST_PLAIN_WITHOUT_GRADIENT = 256

Group = tuple[
    int, tuple[int, ...]
]  # tokens of a shared prompt, tokens of each response; no responses: a whole sequence


class _Sharing(NamedTuple):
    """Responses to one prompt, stored side by side."""

    prompt_start: int
    prompt: int  # tokens
    start: int  # of the first response
    responses: tuple[int, ...]  # tokens of each


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Attention layout of a packed row, shared by all layers."""

    buckets: tuple[Bucket, ...]  # none is empty
    order: Tensor  # [N] int64: token i of the row is entry order[i] of the buckets' tokens, concatenated
    # [S, 4] int64, on the CPU: first token, tokens, first token of the prompt that they follow, its tokens (0: none)
    spans: Tensor
    found: dict[Any, Any] = field(default_factory=dict)  # results cached by the first layer for later ones

    def places(self, heads: int, kv_heads: int, bucket: int | None = None) -> Places:
        """Return the indices for attend_plain, of one bucket, or (None) of all."""
        key = heads, kv_heads, bucket
        if key not in self.found:
            chosen = self.buckets if bucket is None else (self.buckets[bucket],)
            self.found[key] = places_of(chosen, heads, kv_heads, self.order if bucket is None else None)
        return cast(Places, self.found[key])

    def bias(self, bucket: int, window: int | None) -> Tensor:
        """Return [groups or 1, L, P + L] float32: 0 for keys (prompt, then own) that a query sees, else -inf."""
        key = "bias", bucket, window
        if key not in self.found:
            mask = _visible(self.buckets[bucket], window, self.order.device)
            self.found[key] = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
        return cast(Tensor, self.found[key])


def packed_layout(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packed:
    """Return the layout of a row of whole sequences of these lengths."""
    return shared_layout([(length, ()) for length in lengths], device)


def shared_layout(groups: Sequence[Group], device: torch.device | str = "cpu") -> Packed:
    """Return the layout of a row that holds, group by group, a prompt and then its responses (or one whole sequence)."""
    alone: list[tuple[int, int]] = []  # (start, tokens) of prompts and whole sequences
    sharing: list[_Sharing] = []
    start = 0
    for prompt, responses in groups:
        alone.append((start, prompt))
        if responses:
            sharing.append(_Sharing(start, prompt, start + prompt, responses))
        start += prompt + sum(responses)
    return _packed(alone, sharing, device)


def continued_layout(sequences: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> Packed:
    """Return the layout of a row of sequences whose beginnings are cached: (cached tokens, tokens in the row) of each.

    Keys and values of the cached tokens follow those of the whole row, in the same order.
    """
    alone: list[tuple[int, int]] = []
    sharing: list[_Sharing] = []
    start, known_start = 0, sum(tokens for _, tokens in sequences)
    for known, tokens in sequences:
        if known:
            sharing.append(_Sharing(known_start, known, start, (tokens,)))
        else:
            alone.append((start, tokens))
        start, known_start = start + tokens, known_start + known
    return _packed(alone, sharing, device)


def _packed(alone: Sequence[tuple[int, int]], sharing: Sequence[_Sharing], device: torch.device | str) -> Packed:
    buckets = [bucket for bucket in (*_plain_buckets(alone), *_sharing_buckets(sharing)) if len(bucket.tokens)]
    order = torch.cat([bucket.tokens for bucket in buckets]).argsort()
    spans = [(start, tokens, 0, 0) for start, tokens in alone if tokens]
    for group in sharing:
        start = group.start
        for tokens in group.responses:
            if tokens:
                spans.append((start, tokens, group.prompt_start, group.prompt))
            start += tokens
    return Packed(tuple(_moved(bucket, device) for bucket in buckets), order.to(device), torch.tensor(spans))


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Packed,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of one layer over a packed row.

    Args: query [1, heads, N, head_dim]; key, value [1, kv_heads, N, head_dim]; window: a query sees at most this many of the
        latest keys, itself included; softcap c: scores x, the products times scaling, are replaced by c tanh(x / c); sinks
        [heads]: a score of each head that takes a share of the weights and adds nothing. torch's fused kernels compute neither:
        without compiled kernels memory then grows with length^2.
    Returns: [1, N, heads, head_dim].
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if attention_for(queries, keys, values) is not None:
        settings = Settings(layout.spans, scaling, window, softcap or 0.0)
        compiled: Tensor = _AttendCompiled.apply(queries, keys, values, sinks, settings)
        return compiled[None]
    numbers = range(len(layout.buckets))
    on_cpu = query.device.type == "cpu"
    always = softcap is not None or sinks is not None
    plain = [always or (on_cpu and bucket.keys <= _longest_plain(bucket, window)) for bucket in layout.buckets]
    if all(plain):
        biases = [layout.bias(number, window) for number in numbers]
        places = layout.places(heads, kv_heads)
        return attend_plain(queries, keys, values, places, biases, scaling, softcap, sinks)[None]
    outputs = []
    for number, bucket in enumerate(layout.buckets):
        if plain[number]:
            places, bias = layout.places(heads, kv_heads, number), layout.bias(number, window)
            outputs.append(attend_plain(queries, keys, values, places, [bias], scaling, softcap, sinks))
            continue
        q, k, v = (
            _padded(states, bucket.tokens, bucket.places, bucket.rows, bucket.length) for states in (query, key, value)
        )
        prefix = bucket.prefix
        before = None
        if prefix is not None:
            groups = prefix.visible.shape[0]
            before = tuple(
                _padded(states, prefix.tokens, prefix.places, groups, prefix.length) for states in (key, value)
            )
        # A mask has length^2 values: omitted where possible.
        mask = None if _causal(bucket, window) else _visible(bucket, window, q.device)
        output = _attend_fused(q, k, v, before, mask, scaling)
        outputs.append(_SelectRows.apply(output.flatten(0, 1), bucket.places))
    return _SelectRows.apply(torch.cat(outputs), layout.order)[None]


class _AttendCompiled(torch.autograd.Function):
    """Attention by compiled kernels. Keeps the log of every query's sum, from which the backward pass makes the weights again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: Settings
    ) -> Tensor:
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        ctx.sinks_dtype, exact = (None, None) if sinks is None else (sinks.dtype, sinks.float().contiguous())
        ctx.kernels, ctx.settings = attention_for(query, key, value), settings
        output, lse = ctx.kernels.forward(query, key, value, exact, settings)
        ctx.save_for_backward(lse, query, key, value, exact)
        found: Tensor = output
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *grads, of_sinks = ctx.kernels.backward(grad.contiguous(), *ctx.saved_tensors, ctx.settings)
        return *grads, None if of_sinks is None else of_sinks.to(ctx.sinks_dtype), None


def _causal(bucket: Bucket, window: int | None) -> bool:
    """Return True where every token sees all tokens of its sequence up to itself, and no others."""
    return bucket.prefix is None and (window is None or window >= bucket.length)


def _longest_plain(bucket: Bucket, window: int | None) -> int:
    """Return the number of keys up to which plain products are the faster attention on a CPU."""
    if torch.is_grad_enabled() or not _causal(bucket, window):
        return LONGEST_PLAIN
    return min(LONGEST_PLAIN, LONGEST_PLAIN_WITHOUT_GRADIENT)


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, before: tuple[Tensor, ...] | None, mask: Tensor | None, scaling: float
) -> Tensor:
    """Compute softmax(scaling q k' + mask) v with torch's fused kernel, whose memory does not grow with length^2; shared prompts
    are repeated. Mask None is plain causal attention, which has faster kernels.

    Args: query [R, heads, L, D]; key, value [R, kv_heads, L, D]; before: prompt keys and values [G, kv_heads, P, D];
        mask [G or 1, L, P + L] bool. Returns: [R, L, heads, D].
    """
    rows, heads = query.shape[:2]
    if before:
        members = rows // before[0].shape[0]
        key, value = (
            torch.cat([states.repeat_interleave(members, dim=0), own], dim=2)
            for states, own in zip(before, (key, value), strict=True)
        )
    key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    visible = None if mask is None else mask.repeat_interleave(rows // mask.shape[0], dim=0)[:, None]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling
    )
    return output.transpose(1, 2)


def _visible(bucket: Bucket, window: int | None, device: torch.device) -> Tensor:
    """Return [groups or 1, L, P + L] bool: True for keys (prompt, then own) that a query sees."""
    prefix = bucket.prefix.length if bucket.prefix else 0
    # Prompts end where their responses begin, so positions continue from the padded prompt's end.
    query = torch.arange(prefix, prefix + bucket.length, device=device)
    distance = query[:, None] - torch.arange(prefix + bucket.length, device=device)
    visible = ((distance >= 0) & (distance < (window or prefix + bucket.length)))[None]
    if bucket.prefix is None:
        return visible
    own = torch.ones(len(bucket.prefix.visible), bucket.length, dtype=torch.bool, device=device)
    return visible & torch.cat([bucket.prefix.visible, own], dim=1)[:, None]


def _plain_buckets(sequences: Sequence[tuple[int, int]]) -> Iterator[Bucket]:
    """Cut sequences, given as (start, tokens), into buckets of similar length."""
    by_length = sorted(sequences, key=lambda sequence: sequence[1], reverse=True)
    begin = 0
    while begin < len(by_length):
        longest = by_length[begin][1]
        end, needed = begin, 0
        while end < len(by_length):
            needed += by_length[end][1] ** 2
            padded = (end - begin + 1) * longest**2
            if end > begin and (padded > WASTE * needed or padded > MAX_SCORES):
                break
            end += 1
        members = by_length[begin:end]
        yield Bucket(
            tokens=torch.cat([torch.arange(start, start + tokens) for start, tokens in members]),
            places=torch.cat([torch.arange(tokens) + row * longest for row, (_, tokens) in enumerate(members)]),
            rows=len(members),
            length=longest,
        )
        begin = end


def _sharing_buckets(groups: Sequence[_Sharing]) -> Iterator[Bucket]:
    """Cut groups into buckets of equal group size and similar lengths."""
    ordered = sorted(groups, key=lambda group: (len(group.responses), max(group.responses), group.prompt), reverse=True)
    begin = 0
    while begin < len(ordered):
        first = ordered[begin]
        members, longest, prompt = len(first.responses), max(first.responses), first.prompt
        end, needed = begin, 0
        while end < len(ordered) and len(ordered[end].responses) == members:
            prompt = max(prompt, ordered[end].prompt)
            needed += members * max(ordered[end].responses) * (ordered[end].prompt + max(ordered[end].responses))
            padded = (end - begin + 1) * members * longest * (prompt + longest)
            if end > begin and (padded > WASTE * needed or padded > MAX_SCORES):
                break
            end += 1
        yield _sharing_bucket(ordered[begin:end], members, longest)
        begin = end


def _sharing_bucket(groups: Sequence[_Sharing], members: int, longest: int) -> Bucket:
    prefix = max(group.prompt for group in groups)
    tokens, places, prompt_tokens, prompt_places = [], [], [], []
    for number, (prompt_start, prompt, start, responses) in enumerate(groups):
        prompt_tokens.append(torch.arange(prompt_start, prompt_start + prompt))
        prompt_places.append(torch.arange(prefix - prompt, prefix) + number * prefix)
        for member, response in enumerate(responses):
            tokens.append(torch.arange(start, start + response))
            places.append(torch.arange(response) + (number * members + member) * longest)
            start += response
    padding = torch.tensor([prefix - group.prompt for group in groups])
    return Bucket(
        tokens=torch.cat(tokens),
        places=torch.cat(places),
        rows=len(groups) * members,
        length=longest,
        prefix=Prefix(
            tokens=torch.cat(prompt_tokens),
            places=torch.cat(prompt_places),
            visible=torch.arange(prefix) >= padding[:, None],
            length=prefix,
        ),
    )


def _moved(bucket: Bucket, device: torch.device | str) -> Bucket:
    prefix = bucket.prefix
    if prefix is not None:
        prefix = Prefix(
            tokens=prefix.tokens.to(device),
            places=prefix.places.to(device),
            visible=prefix.visible.to(device),
            length=prefix.length,
        )
    return Bucket(
        tokens=bucket.tokens.to(device),
        places=bucket.places.to(device),
        rows=bucket.rows,
        length=bucket.length,
        prefix=prefix,
    )


def _padded(states: Tensor, tokens: Tensor, places: Tensor, rows: int, length: int) -> Tensor:
    """Pad [1, heads, N, head_dim] to [rows, heads, length, head_dim], with zeros."""
    placed = _PlaceRows.apply(_SelectRows.apply(states[0].transpose(0, 1), tokens), places, rows * length)
    return placed.view(rows, length, *placed.shape[1:]).transpose(1, 2)


class _SelectRows(torch.autograd.Function):
    """values[index] for distinct row numbers. Autograd's own backward would accumulate row by row; this one only writes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = values.shape[0]
        return values[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.size, *grad.shape[1:])
        out[index] = grad
        return out, None


class _PlaceRows(torch.autograd.Function):
    """Writes rows to distinct places of a zero tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        out = values.new_zeros(size, *values.shape[1:])
        out[index] = values
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad[index], None, None
