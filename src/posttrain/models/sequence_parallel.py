"""One packed row over several devices: each has a stretch of its tokens and, in attention, all tokens of some of the heads.

DeepSpeed-Ulysses (arXiv:2309.14509): before attention every device sends every other one that one's heads of its own tokens,
and gets its own heads of all tokens; afterwards they go back. Everything else in a layer looks at one token at a time, so it
needs nobody.
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
    """How a row that is split over a group is attended to; the same for every layer and every device."""

    layout: Packed  # of the whole row
    tokens: int  # of the whole row, N
    group: dist.ProcessGroup  # D devices; each has ceil(N / D) tokens, the last one with filling behind


def stretch(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This device's part of the values of a row, [N] to [ceil(N / D)]; the row is filled up with 0."""
    devices, length = group.size(), -(-len(values) // group.size())
    return pad(values, (0, length * devices - len(values)))[group.rank() * length :][:length]


def attend_split(
    query: Tensor, key: Tensor, value: Tensor, row: SplitRow, scaling: float, window: int | None
) -> Tensor:
    """Attention of one layer over a row that is split.

    Args: query [1, heads, n, head_dim] of this device's n tokens; key, value [1, kv_heads, n, head_dim]; the devices divide
        heads. Key/value heads that they do not divide are repeated as often as needed; a head that several devices need
        then goes to each of them. window as in attend_packed.
    Returns: [1, n, heads, head_dim].
    """
    devices = row.group.size()
    heads, length, dim = query.shape[1:]
    times = repeats(heads, key.shape[1], devices)
    if times > 1:
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    sizes = [states.shape[1] // devices for states in (query, key, value)]
    mine = torch.cat([states.reshape(devices, -1, length, dim) for states in (query, key, value)], dim=1)
    received = _Exchange.apply(mine, row.group)  # [devices, heads here, n, head_dim], from each its tokens
    whole = received.transpose(0, 1).flatten(1, 2)[None, :, : row.tokens]
    query, key, value = whole.split(sizes, dim=1)
    output = attend_packed(query, key, value, row.layout, scaling, window)  # [1, N, heads here, head_dim]
    filled = pad(output[0], (0, 0, 0, 0, 0, devices * length - row.tokens))
    back = _Exchange.apply(filled.view(devices, length, sizes[0], dim), row.group)  # from each its heads of my tokens
    return back.transpose(0, 1).reshape(1, length, heads, dim)


def repeats(heads: int, kv_heads: int, devices: int) -> int:
    """How often every key/value head must be there so that the devices divide them, and each has those of its queries.

    32 query heads, 8 key/value heads: once for 8 devices, twice for 16 (each half of a head's queries with one of the two).
    """
    shared = heads // kv_heads  # queries of a key/value head
    return next(times for times in range(1, shared + 1) if shared % times == 0 and kv_heads * times % devices == 0)


def collect(values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """[m] values of this device's scored tokens to those of all devices, [count], in their places.

    Every device goes on to compute the same loss of all of them. Its gradient is the same on all devices, and each takes
    what belongs to its own values: the loss counts once, whatever the number of devices.
    """
    collected: Tensor = _Collect.apply(values, places, count, group)
    return collected


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to device i of the group. Done twice, everything is back: it is its own gradient."""

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
        out = values.new_zeros(count)
        out[places] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None
