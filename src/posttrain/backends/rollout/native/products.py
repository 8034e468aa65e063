"""Fast matrix products of a few rows with fixed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]
# From weights, one below the other, and their biases: the product with them
Stack = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Product]

# With fewer rows the matrix library adds in another order (bfloat16: for one row, long sums; float32: for up to 3), and the
# last bits of a response would depend on the number of other rows: fewer are filled up.
FEWEST_ROWS = 4
ROWS_HINT = 64  # the packed layout chosen for it was equally fast from 4 to 256 rows


def stacked_product(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
    """Return the function x -> x @ [W1; W2; ...]^T + [b1; b2; ...], [rows, in] -> [rows, sum of outs].

    In bfloat16 on a CPU the weights are stacked and copied into the matrix library's own layout, which saves that copy in
    every call: 1.5 times as fast with 64 rows, 1.2 with 256, bit-identical results. Elsewhere the weights are used without a
    copy. In both cases the function must be rebuilt when the weights change (KeptProducts).
    """
    if copies_weights(weights):
        bias = None
        if any(one is not None for one in biases):
            parts = zip(biases, weights, strict=True)
            bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one for one, weight in parts])
        return _packed(torch.cat(list(weights)) if len(weights) > 1 else weights[0], bias)
    if len(weights) == 1:
        return lambda x: linear(x, weights[0], biases[0])
    pairs = list(zip(weights, biases, strict=True))
    return lambda x: torch.cat([linear(x, weight, bias) for weight, bias in pairs], dim=1)


def copies_weights(weights: Sequence[Tensor]) -> bool:
    """Return True where ``stacked_product`` multiplies by a packed copy of these weights, not by the weights themselves."""
    return all(weight.dtype == torch.bfloat16 and weight.device.type == "cpu" for weight in weights) and _packs()


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
