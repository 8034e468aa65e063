"""Products with weights of eight bits: 255 steps between minus and plus the largest weight of an output (rollout.weights: int8).

A pass over few rows takes as long as its weights take to be read, and these are half as many bytes. The products are compiled for
the processor (int8.cpp); where they cannot be, torch's operations multiply the same rounded weights, in no less time than others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from posttrain.backends.rollout.native.products import Product, Stack, stacked_product
from posttrain.libraries.cpu_kernels.build import compiled_library

SOURCE = Path(__file__).with_name("int8.cpp")
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
PANEL = 32  # outputs that are packed together, as in int8.cpp
LARGEST = 127
NUMBERS_AT_A_TIME = 1 << 19  # weights that are rounded at a time, so that their float32 copies stay in a core's caches
# Largest distance of a kernel's products to those in float64, of their size: a rounding of the result, and of sums
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}


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
    found = load_int8_kernels(dtype)
    return (_by_torch, found) if isinstance(found, str) else (found.stacked, "")


@cache
def load_int8_kernels(dtype: torch.dtype) -> Int8Kernels | str:
    """Load the kernels for rows of ``dtype``, one of DTYPES, compiling them if necessary, and compare them with products in
    float64. Returns: them, or why not."""
    library = compiled_library(SOURCE)
    if isinstance(library, str):
        return library
    kernels, random = Int8Kernels(library, dtype), torch.Generator().manual_seed(0)
    for rows, outputs, inputs in ((1, 40, 33), (30, 70, 96)):
        weight, x = (
            torch.randn(outputs, inputs, generator=random),
            torch.randn(rows, inputs, generator=random).to(dtype),
        )
        multiples, scales = quantize(weight)
        expected = x.double() @ (multiples.double() * scales[:, None]).T
        apart = (kernels.stacked([weight], [None])(x).double() - expected).norm() / expected.norm()
        if not apart <= TOLERANCE[dtype]:
            return "their results differ here"
    return kernels


class Int8Kernels:
    """Products of rows of one dtype on a CPU. A row's results do not depend on the other rows, to the bit."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self.dtype = dtype
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._pack = getattr(library, f"pack_{DTYPES[dtype]}")
        self._pack.argtypes = (pointer, number, number, pointer, threads)
        self._product = getattr(library, f"product_{DTYPES[dtype]}")
        self._product.argtypes = (*(pointer,) * 4, *(number,) * 3, pointer, threads)
        self._pack.restype = self._product.restype = None

    def stacked(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
        """Round and pack weights, see ``stacked_product``. They are not read again."""
        multiples, scales, bias = _stacked(weights, biases)
        outputs, inputs = multiples.shape
        panels = -(-outputs // PANEL)
        packed = torch.empty(panels * PANEL * (inputs + inputs % 2), dtype=torch.int8)
        self._pack(multiples.data_ptr(), inputs, outputs, packed.data_ptr(), torch.get_num_threads())
        numbers = torch.zeros(2, panels * PANEL)
        numbers[0, :outputs], numbers[1, :outputs] = scales, bias

        def product(x: Tensor) -> Tensor:
            x = x.to(self.dtype).contiguous()
            y = x.new_empty(len(x), outputs)
            of_scales, of_biases = numbers[0].data_ptr(), numbers[1].data_ptr()
            sizes, threads = (len(x), inputs, outputs), torch.get_num_threads()
            self._product(x.data_ptr(), packed.data_ptr(), of_scales, of_biases, *sizes, y.data_ptr(), threads)
            return y

        return product


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
