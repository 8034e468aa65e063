"""Products with weights of eight bits: 255 steps between minus and plus the largest weight of an output (rollout.weights: int8).

A pass over few rows takes as long as its weights take to be read, and these are half as many bytes. The products are compiled for
the processor (products.cpp); where they cannot be, torch's operations multiply the same rounded weights, in no less time than
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.backends.rollout.native.packed_products import DTYPES, Product, Stack, load_product_kernels
from posttrain.backends.rollout.native.products import stacked_product

LARGEST = 127
NUMBERS_AT_A_TIME = 1 << 19  # weights that are rounded at a time, so that their float32 copies stay in a core's caches


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the weights of each output to whole multiples of its scale, the largest of them being 127 scales.

    Args: weight [outputs, inputs]. Returns: the multiples [outputs, inputs] int8, from -127 to 127; scales [outputs] float32, in
        units of the weights: 0 where all weights are 0, not finite where one of them is not.
    """
    weight = weight.detach()
    multiples = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    at_a_time = max(1, NUMBERS_AT_A_TIME // weight.shape[1])
    for rows, found, scale in zip(
        weight.split(at_a_time), multiples.split(at_a_time), scales.split(at_a_time), strict=True
    ):
        numbers = rows.float()
        scale.copy_(numbers.abs().amax(dim=1) / LARGEST)
        steps = torch.where(scale > 0, scale, 1.0)
        found.copy_((numbers / steps[:, None]).round_().nan_to_num_())
    return multiples, scales


def int8_products(dtype: torch.dtype, device: torch.device) -> tuple[Stack, str]:
    """Return the maker of products with rounded weights, in the place of ``stacked_product``, and the reason why it is one of
    torch's operations; "" for kernels."""
    if device.type != "cpu" or dtype not in DTYPES:
        return _by_torch, f"there are none for {dtype} on {device.type}"
    found = load_product_kernels(dtype, "int8")
    if isinstance(found, str):
        return _by_torch, found
    kernels = found

    def by_kernels(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
        multiples, scales, bias = _stacked(weights, biases)
        return kernels.product(multiples, bias, scales)

    return by_kernels, ""


def _by_torch(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
    """The same products, whose sums are rounded once before they are scaled."""
    multiples, scales, bias = _stacked(weights, biases)
    multiply = stacked_product([multiples.to(weights[0].dtype)], [None])
    return lambda x: (multiply(x).float() * scales + bias).to(x.dtype)


def _stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the multiples [outputs, inputs] int8, scales and biases [outputs] float32 of weights, one below the other."""
    found = [quantize(weight) for weight in weights]
    pairs = zip(weights, biases, strict=True)
    bias = [weight.new_zeros(len(weight)).float() if one is None else one.detach().float() for weight, one in pairs]
    return torch.cat([each for each, _ in found]), torch.cat([scales for _, scales in found]), torch.cat(bias)
