"""Fast matrix products of rows with fixed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from posttrain.backends.rollout.native.packed_products import (
    DTYPES,
    Int16Kernels,
    Product,
    ProductKernels,
    load_int16_kernels,
    load_product_kernels,
)

# With fewer rows the matrix library adds in another order (bfloat16: for one row, long sums; float32: for up to 3), and the
# last bits of a response would depend on the number of other rows: fewer are filled up.
FEWEST_ROWS = 4
ROWS_HINT = 64  # the packed layout chosen for it was equally fast from 4 to 256 rows


def stacked_product(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
    """Return the function x -> x @ [W1; W2; ...]^T + [b1; b2; ...], [rows, in] -> [rows, sum of outs].

    On a CPU the weights are stacked and packed, for kernels of our own (``product_kernels``) or, in bfloat16, in the matrix
    library's layout. Elsewhere they are used without a copy. In both cases the function must be rebuilt when the weights change
    (KeptProducts).
    """
    kernels = product_kernels(weights[0])
    return library_product(weights, biases) if kernels is None else kernels.product(*_stacked(weights, biases))


def library_product(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
    """The same by the matrix library."""
    if _is_bfloat16(weights[0]) and _packs():
        return _packed(*_stacked(weights, biases))
    if len(weights) == 1:
        return lambda x: linear(x, weights[0], biases[0])
    pairs = list(zip(weights, biases, strict=True))
    return lambda x: torch.cat([linear(x, weight, bias) for weight, bias in pairs], dim=1)


def _stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Stack weights, and their biases if there are any."""
    stacked = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    if all(one is None for one in biases):
        return stacked, None
    pairs = zip(biases, weights, strict=True)
    return stacked, torch.cat([weight.new_zeros(len(weight)) if one is None else one for one, weight in pairs])


def copies_weights(weights: Sequence[Tensor]) -> bool:
    """Return True where ``stacked_product`` multiplies by a packed copy of these weights, not by the weights themselves."""
    return product_kernels(weights[0]) is not None or (_is_bfloat16(weights[0]) and _packs())


def product_kernels(weight: Tensor) -> ProductKernels | Int16Kernels | None:
    """Return the kernels that multiply by such weights; None where the matrix library does. That has the faster products of
    bfloat16 where the processor has tiles (AMX)."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    if weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return None
    found: ProductKernels | Int16Kernels | str = ""
    if weight.dtype == torch.bfloat16:
        found = load_int16_kernels()
    if isinstance(found, str):
        found = load_product_kernels(weight.dtype, "whole")
    return None if isinstance(found, str) else found


def _is_bfloat16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    # The operators that torch.compile uses for frozen weights. They have no public name.
    operators = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
    return lambda x: operators._linear_pointwise(x, packed, bias, "none", [], "")


def _packs() -> bool:
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
        and operators._is_mkldnn_bf16_supported()
    )
