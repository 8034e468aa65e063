"""Products of bfloat16 matrices whose results are float32, or rounded where that costs little."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.libraries.cpu_kernels.load import int16_products_for, kernels_for
from posttrain.libraries.processor import multiplies_bfloat16_slowly

SHIFT_COLUMNS = 3  # bfloat16 numbers of 8 digits each, for the 24 of a float32


def widens(hidden: Tensor) -> bool:
    """Return True for bfloat16 tensors whose products are faster as those of other numbers, on this CPU."""
    return hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu" and multiplies_bfloat16_slowly()


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right with a float32 result (float64 for float64)."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    if widens(left):
        return left.float() @ right.float()
    # A CPU's product of bfloat16 matrices rounds its result. The same product of float32 copies does not, and may use the
    # same instructions, as bfloat16 numbers lose nothing when their copies are rounded back.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if left.dtype == torch.bfloat16 else before
    try:
        return left.float() @ right.float()
    finally:
        matmul.fp32_precision = before


def close_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right with a float32 result, exactly or, where whole numbers are multiplied faster, to 2e-4 of its norm."""
    kernels = int16_products_for(left, right)
    return exact_product(left, right) if kernels is None else kernels.product(left, kernels.pack(right.T), wide=True)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 tensor. Args: left, float32; right, bfloat16 that ``widens``."""
    kernels = int16_products_for(right)
    if kernels is None:
        total.addmm_(left, right.float())
    else:
        total += kernels.product(left, kernels.pack(right.T))


def turned_product(right: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from left, float32 [N, columns], to left.T @ right, in float32. Args: right [N, H], bfloat16 that
    ``widens``."""
    kernels = int16_products_for(right)
    if kernels is None:
        wide = right.float()
        return lambda left: left.T @ wide
    packed = kernels.pack(right.T)
    return lambda left: kernels.packed_product(kernels.pack(left.T), packed, torch.float32)


def with_shift(hidden: Tensor, shift: Tensor) -> Tensor:
    """[N, H + 3]: times ``with_ones(weight).T`` it is hidden @ weight.T - shift, added up in float32 and then rounded. The shift
    [N] stands in three columns, as three bfloat16 numbers that add up to it."""
    pieces = []
    for _ in range(SHIFT_COLUMNS):
        pieces.append(shift.bfloat16())
        shift = shift - pieces[-1]
    return torch.cat([hidden, -torch.stack(pieces, dim=1)], dim=1)


def with_ones(weight: Tensor) -> Tensor:
    """weight [V, H] -> [V, H + 3], see with_shift."""
    return torch.cat([weight, weight.new_ones(len(weight), SHIFT_COLUMNS)], dim=1)


def add_to(total: Tensor, addend: Tensor) -> None:
    """Add to a tensor of the same shape, in place, in its dtype."""
    kernels = kernels_for(addend) if total.dtype == torch.float32 else None
    if kernels is not None:
        kernels.add(addend, total)
    else:
        total += addend
