"""K-quants of GGUF: 256 weights share one or two half-precision factors, and their blocks of 16 or 32 a few bits of scale each.

Q4_K and Q5_K hold w = d * s * q - m * t for eight blocks of 32 weights: q of 4 or 5 bits, the block's s and t of 6 bits, and
d and m in half precision. Q6_K holds w = d * s * q for sixteen blocks of 16: q from -32 to 31, s from -128 to 127. The package
gguf reads these kinds and writes none.
Source: the layout is ggml's (as gguf's reader has it). Scales are searched as ggml does without an importance matrix: a fixed
list of candidate grids, and for each the weighted least-squares scale. Tests compare the errors with llama.cpp's.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

SUPER = 256
# Weights that are rounded at once: the search holds some twenty arrays of this size.
AT_ONCE = 1 << 21
Kind = gguf.GGMLQuantizationType


def quantize(weights: Tensor, kind: Kind) -> np.ndarray:
    """Round weights to a K-quant.

    Args: weights [..., columns] of any floating dtype; columns are a multiple of 256; ``kind`` Q4_K, Q5_K or Q6_K.
    Returns: [..., bytes] uint8.
    """
    rows = weights.reshape(-1, SUPER)
    pack = {Kind.Q4_K: _pack_q4, Kind.Q5_K: _pack_q5, Kind.Q6_K: _pack_q6}[kind]
    packed = torch.cat([pack(part.float()) for part in rows.split(AT_ONCE // SUPER)])
    return packed.reshape(*weights.shape[:-1], -1).numpy()


def _pack_q4(rows: Tensor) -> Tensor:
    factors, levels = _affine(rows, largest=15, first=-1.0, steps=21)
    low, high = levels.reshape(-1, 4, 2, 32).unbind(2)  # neighbouring blocks share bytes
    return torch.cat([factors, (low | high << 4).flatten(1)], 1)


def _pack_q5(rows: Tensor) -> Tensor:
    factors, levels = _affine(rows, largest=31, first=-0.5, steps=16)
    low, high = (levels & 15).reshape(-1, 4, 2, 32).unbind(2)
    places = torch.arange(8, dtype=torch.uint8)[None, :, None]
    # Bit b of byte i: weight i of block b
    fifth = ((levels >> 4) << places).sum(1, dtype=torch.uint8)
    return torch.cat([factors, fifth, (low | high << 4).flatten(1)], 1)


def _pack_q6(rows: Tensor) -> Tensor:
    blocks = rows.reshape(-1, 16, 16)
    wanted = _symmetric_scale(_side_by_side(rows, 16)).reshape(-1, 16)
    extreme = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))
    per_scale = torch.where(extreme.abs() < 1e-15, 0.0, -128 / extreme)
    factor = torch.where(per_scale == 0, 0.0, 1 / per_scale).half()
    scales = (per_scale * wanted).round().clamp(max=127)
    levels = (_divided(blocks, factor.float() * scales)).round().clamp(-32, 31) + 32
    levels = levels.to(torch.uint8).reshape(-1, 2, 4, 32)  # halves of 128 weights, in quarters
    first, second, third, fourth = levels.unbind(2)
    low = torch.stack([first & 15 | (third & 15) << 4, second & 15 | (fourth & 15) << 4], 2)
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    return torch.cat([low.flatten(1), high.flatten(1), scales.to(torch.int8).view(torch.uint8), _bytes(factor)], 1)


def _affine(rows: Tensor, *, largest: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Round [n, 256] weights to levels from 0 to ``largest``.

    Returns: the bytes of the factors [n, 16]; the levels [n, 8, 32] uint8.
    """
    blocks = rows.reshape(-1, 8, 32)
    scales, offsets = (
        each.reshape(-1, 8) for each in _affine_scale(_side_by_side(rows, 32), largest, first=first, steps=steps)
    )
    factors: list[Tensor] = []
    small: list[Tensor] = []
    for wanted in (scales, offsets):
        top = wanted.amax(1, keepdim=True)
        small.append((torch.where(top > 0, 63 / top, 0.0) * wanted).round().clamp(max=63))
        factors.append((top / 63).half())
    scale, shift = (factor.float() * each for factor, each in zip(factors, small, strict=True))
    levels = _divided(blocks + shift[..., None], scale).round().clamp(0, largest).to(torch.uint8)
    s, t = (each.to(torch.uint8) for each in small)
    # 6 bits each in 12 bytes: blocks 0-3 whole, with two upper bits of blocks 4-7 above them, then the latter's lower halves
    upper = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, t)]
    return torch.cat([*map(_bytes, factors), *upper, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4], 1), levels


def _affine_scale(x: Tensor, largest: int, *, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Return the scale s >= 0 and the offset t >= 0, each [n], of blocks [32, n]: s * q - t is near x, q from 0 to ``largest``.

    Large weights count more: an error's weight is |x| + the block's root mean square. The candidates are the grids that divide
    the range from the best -t so far to the largest weight by largest + first, largest + first + 0.1 ...; each gives levels, and
    those the least-squares s and t.
    """
    counts = x.square().mean(0).sqrt() + x.abs()
    high, offset = x.amax(0), x.amin(0).clamp(max=0.0)
    flat = high == offset
    scale = (high - offset) / largest
    total, sum_x = counts.sum(0), (counts * x).sum(0)

    def levels_of(divisions: float) -> Tensor:
        return (x - offset).mul_(divisions / (high - offset)).round_().clamp_(0, largest)

    def error(scale: Tensor, offset: Tensor, levels: Tensor) -> Tensor:
        return (scale * levels).add_(offset).sub_(x).square_().mul_(counts).sum(0)

    best = error(scale, offset, levels_of(largest))
    for step in range(steps):
        levels = levels_of(largest + first + 0.1 * step)
        weighted = counts * levels
        sum_q, sum_qx = weighted.sum(0), (weighted * x).sum(0)
        sum_qq = weighted.mul_(levels).sum(0)
        determinant = total * sum_qq - sum_q * sum_q
        found_offset = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        free = (total * sum_qx - sum_x * sum_q) / determinant
        found_scale = torch.where(found_offset > 0, sum_qx / sum_qq, free)
        found_offset.clamp_(max=0.0)
        found = error(found_scale, found_offset, levels)
        better = (determinant > 0) & (found < best)  # NaN is never better
        best = torch.where(better, found, best)
        scale, offset = torch.where(better, found_scale, scale), torch.where(better, found_offset, offset)
    return torch.where(flat, 0.0, scale), -offset


def _symmetric_scale(x: Tensor) -> Tensor:
    """Return the scale s, of either sign, of blocks [16, n], each [n], so that s * q is near x, q from -32 to 31.

    Errors weigh x squared. The candidates put the weight that is largest by absolute value on q = -31.1 ... -32.9.
    """
    extreme = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    empty = extreme.abs() < 1e-15
    extreme = torch.where(empty, 1.0, extreme)
    counts = x.square()
    best = best_scale = torch.zeros_like(extreme)
    for step in (0, *range(-9, 0), *range(1, 10)):
        levels = (-(32 + 0.1 * step) / extreme * x).round().clamp(-32, 31)
        weighted = counts * levels
        products, squares = (weighted * x).sum(0), (weighted * levels).sum(0)
        better = (squares > 0) & (products * products > best * squares)
        scale = products / torch.where(squares > 0, squares, 1.0)
        best_scale, best = torch.where(better, scale, best_scale), torch.where(better, scale * products, best)
    return torch.where(empty, 0.0, best_scale)


def _side_by_side(rows: Tensor, size: int) -> Tensor:
    """Blocks of ``size`` weights as columns [size, n]: sums over the first dimension are many times as fast in torch."""
    return rows.reshape(-1, size).T.contiguous()


def _divided(blocks: Tensor, steps: Tensor) -> Tensor:
    """Blocks [n, blocks, size] over their steps [n, blocks]; 0 where the step is."""
    return torch.where(steps == 0, 0.0, 1 / steps)[..., None].mul(blocks)


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8)
