"""Sequence parallelism: each device holds a slice of a packed row's tokens and, in attention, all tokens of some heads.

DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all before attention exchanges slices of all heads for whole sequences of some
heads; a second one reverses it. All other parts of a layer process tokens independently and need no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from posttrain.models.packed_attention import Packed, attend_packed


@dataclass(frozen=True, slots=True, eq=False)
class SplitRow:
    """Attention layout of a row split over a group, shared by all layers and devices."""

    layout: Packed  # of the whole row
    tokens: int  # of the whole row, N
    group: dist.ProcessGroup  # D devices; each has ceil(N / D) tokens, the last one with padding at the end


def stretch(values: Tensor, group: dist.ProcessGroup, filling: int = 0) -> Tensor:
    """Return this device's slice of a row's values, [N, ...] to [ceil(N / D), ...]; the row is padded."""
    devices, length = group.size(), -(-len(values) // group.size())
    whole = pad(values, (*(0, 0) * (values.ndim - 1), 0, length * devices - len(values)), value=filling)
    return whole[group.rank() * length :][:length]


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the slices of all devices, [n, ...] whole numbers, to the padded row's values, on the CPU. No gradient."""
    mine = values.int().contiguous()  # gloo sends no int16
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).to("cpu", values.dtype)


def attend_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: SplitRow,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of one layer over a split row.

    Args: query [1, heads, n, head_dim] of this device's n tokens; key, value [1, kv_heads, n, head_dim]; the number of devices
        divides heads. Key/value heads are repeated until it divides them, too; a head needed by several devices then goes to
        each of them. window, softcap, sinks (of all heads) as in attend_packed.
    Returns: [1, n, heads, head_dim].
    """
    devices = row.group.size()
    heads, length, dim = query.shape[1:]
    times = repeats(heads, key.shape[1], devices)
    if times > 1:
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    sizes = [states.shape[1] // devices for states in (query, key, value)]
    mine = torch.cat([states.reshape(devices, -1, length, dim) for states in (query, key, value)], dim=1)
    received = _Exchange.apply(mine, row.group)  # [devices, heads here, n, head_dim], each device's tokens
    whole = received.transpose(0, 1).flatten(1, 2)[None, :, : row.tokens]
    query, key, value = whole.split(sizes, dim=1)
    # [1, N, heads here, head_dim]
    if sinks is not None:
        sinks = sinks.chunk(devices)[row.group.rank()]
    output = attend_packed(query, key, value, row.layout, scaling, window, softcap, sinks)
    filled = pad(output[0], (0, 0, 0, 0, 0, devices * length - row.tokens))
    # Each device's heads of my tokens.
    back = _Exchange.apply(filled.view(devices, length, sizes[0], dim), row.group)
    return back.transpose(0, 1).reshape(1, length, heads, dim)


def repeats(heads: int, kv_heads: int, devices: int) -> int:
    """Return how often to repeat every key/value head so that the devices divide them, and each has those of its queries.

    32 query heads, 8 key/value heads: once for 8 devices, twice for 16 (each half of a head's queries with one of the two).
    """
    shared = heads // kv_heads  # queries of a key/value head
    return next(times for times in range(1, shared + 1) if shared % times == 0 and kv_heads * times % devices == 0)


def collect(values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Gather [m, ...] values of this device's scored tokens from all devices, to [count, ...], in their places.

    Every device computes the same loss from all of them. Its gradient is the same on all devices, and each takes the part of
    its own values: the loss counts once, for any number of devices.
    """
    collected: Tensor = _Collect.apply(values, places, count, group)
    return collected


class _Exchange(torch.autograd.Function):
    """Sends part i of the first dimension to device i of the group. It is its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        out = values.new_zeros(count, *values.shape[1:])
        out[places] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None
