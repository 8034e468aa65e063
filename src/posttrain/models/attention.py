"""Our attention for Hugging Face models, registered through transformers' attention interface.

One registered function serves two layouts; the caller says which by passing ``attention_layout`` to the model's forward:
``Packed`` (sequences side by side in one row, for training, scoring and prefill) or ``CachedRows`` (one new token per row
against a key/value cache, for decoding). Padding exists inside the packed attention only, between sequences of like length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "posttrain"

# Bounds of a bucket: how much larger than needed its score matrices may be, and how many scores it may hold at once.
WASTE = 1.25
MAX_SCORES = 1 << 22
# On a CPU, plain matrix products beat torch's flash kernel while score matrices stay in cache: with 64 sequences of 68
# tokens (9 heads of 64, bfloat16, 2 threads) forward and backward took 15 ms against 59 ms. Its memory grows with length^2.
LONGEST_PLAIN = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Sequences of like length, attended to together: ``rows`` of them, padded on the right to ``length``."""

    tokens: Tensor  # [n] int64, where the sequences' tokens stand in the packed row
    places: Tensor  # [n] int64, where they stand in [rows * length]
    rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences in one row; each sees only itself, causally."""

    buckets: tuple[Bucket, ...]
    order: Tensor  # [N] int64: token i of the row is entry order[i] of the buckets' tokens, concatenated


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """Row i holds one new query, which sees the cached keys where visible[i] is True."""

    visible: Tensor  # [B, cached_len] bool


def packed_layout(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packed:
    """The layout of sequences of these lengths, in this order in the row."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    buckets: list[Bucket] = []
    begin = 0
    while begin < len(by_length):
        longest = lengths[by_length[begin]]
        end, needed = begin, 0
        while end < len(by_length):
            grown = needed + lengths[by_length[end]] ** 2
            padded = (end - begin + 1) * longest**2
            if end > begin and (padded > WASTE * grown or padded > MAX_SCORES):
                break
            end, needed = end + 1, grown
        members = by_length[begin:end]
        tokens = [torch.arange(starts[i], starts[i] + lengths[i]) for i in members]
        places = [torch.arange(lengths[i]) + row * longest for row, i in enumerate(members)]
        buckets.append(
            Bucket(
                tokens=torch.cat(tokens).to(device), places=torch.cat(places).to(device), rows=len(members), length=longest
            )
        )
        begin = end
    return Packed(tuple(buckets), torch.cat([bucket.tokens for bucket in buckets]).argsort())


def register_attention() -> None:
    """Make ``attn_implementation="posttrain"`` known to transformers. Safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_layout: Packed | CachedRows,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the calling convention of transformers.

    Args: query [B, heads, Q, head_dim]; key, value [B, kv_heads, K, head_dim] with heads a multiple of kv_heads;
        sliding_window: a query sees at most so many of the latest keys, itself included. Dropout is left out on purpose:
        the trainer must score what the sampler sampled.
    Returns: [B, Q, heads, head_dim], None.
    """
    if isinstance(attention_layout, Packed):
        return _packed(query, key, value, attention_layout, scaling, sliding_window), None
    return _cached(query, key, value, attention_layout.visible, scaling, sliding_window), None


def _packed(query: Tensor, key: Tensor, value: Tensor, layout: Packed, scaling: float, window: int | None) -> Tensor:
    """Each bucket in one go; right padding needs no mask, since causal queries never look to their right."""
    outputs = []
    for bucket in layout.buckets:
        q, k, v = (_padded(states, bucket) for states in (query, key, value))
        plain = q.device.type == "cpu" and bucket.length <= LONGEST_PLAIN
        attend = _attend_plain if plain else _attend_fused
        output = attend(q, k, v, scaling, window)  # [rows, length, heads, head_dim]
        outputs.append(_SelectRows.apply(output.flatten(0, 1), bucket.places))
    return _SelectRows.apply(torch.cat(outputs), layout.order)[None]


def _padded(states: Tensor, bucket: Bucket) -> Tensor:
    """[1, heads, N, head_dim] -> [rows, heads, length, head_dim], zeros in the padding."""
    rows = _SelectRows.apply(states[0].transpose(0, 1), bucket.tokens)
    placed = _PlaceRows.apply(rows, bucket.places, bucket.rows * bucket.length)
    return placed.view(bucket.rows, bucket.length, *placed.shape[1:]).transpose(1, 2)


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """softmax(q k' + mask) v by matrix products; query heads sharing a key head stand as rows of one product."""
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    q = query.reshape(rows * kv_heads, groups * length, head_dim)
    k = key.reshape(rows * kv_heads, length, head_dim)
    v = value.reshape(rows * kv_heads, length, head_dim)
    mask = torch.zeros(length, length, dtype=q.dtype, device=q.device)
    mask.masked_fill_(~_visible(length, window, q.device), -torch.inf)
    scores = torch.baddbmm(mask.repeat(groups, 1), q, k.transpose(1, 2), alpha=scaling)
    output = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
    return output.view(rows, heads, length, head_dim).transpose(1, 2)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """The same by torch's fused kernel, whose memory does not grow with length^2."""
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = _visible(length, window, query.device) if window is not None and length > window else None
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return output.transpose(1, 2)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: which keys (columns) a query (row) sees."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < (window or length))


def _cached(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, window: int | None) -> Tensor:
    """The query heads that share a key/value head stand as rows of one query, so keys and values are not repeated."""
    rows, heads, _, head_dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], head_dim)
    if window is not None:
        newest = visible.sum(dim=1, keepdim=True)
        visible = visible & (torch.arange(visible.shape[1], device=visible.device) >= newest - window)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=visible[:, None, None, :], scale=scaling)
    return output.reshape(rows, 1, heads, head_dim)


class _SelectRows(torch.autograd.Function):
    """values[index] for distinct row numbers. Autograd's own backward would add up row by row; this one just writes."""

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
    """Rows written to distinct places of a zero tensor."""

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
