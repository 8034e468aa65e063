"""Products with weights that are packed for kernels of our own (products.cpp), of any number of rows.

A row's results do not depend on the other rows, to the bit, and up to some hundred rows they take less time than the matrix
library's, whose packed products they replace: few rows take as long as their weights take to be read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.cpu_kernels.int16_products import Int16Products, ProductArguments, load_int16_products

SOURCE = Path(__file__).with_name("products.cpp")
NAME = "posttrain::product"  # in profiles
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}  # of rows
# Largest distance of a kernel's products to those in float64, of their size: a rounding of the result, and of sums
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
TRIALS = ((1, 40, 33), (30, 70, 96))  # rows, outputs, inputs

Product = Callable[[Tensor], Tensor]
# From weights, one below the other, and their biases: the product with them
Stack = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Product]
Weights = Literal["whole", "int8"]  # as they are; whole numbers of 8 bits, each output's with a scale


@cache
def load_product_kernels(dtype: torch.dtype, weights: Weights) -> ProductKernels | str:
    """Load the kernels for rows of ``dtype``, one of DTYPES, compiling them if necessary, and compare them with products in
    float64. Returns: them, or why not."""
    library = compiled_library(SOURCE)
    if isinstance(library, str):
        return library
    if not hasattr(library, f"product_{weights}_{DTYPES[dtype]}"):
        return f"the processor has no AVX-512 instructions for products of {DTYPES[dtype]}"
    kernels, random = ProductKernels(library, dtype, weights), torch.Generator().manual_seed(0)
    for rows, outputs, inputs in TRIALS:
        numbers = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        x = torch.randn(rows, inputs, generator=random).to(dtype)
        scales, bias = torch.rand(outputs, generator=random) + 1, 100 * torch.randn(outputs, generator=random)
        if weights == "whole":
            numbers, scales = numbers.to(dtype), torch.ones(outputs)
        expected = x.double() @ (numbers.double() * scales[:, None]).T + bias
        apart = (kernels.product(numbers, bias, scales)(x).double() - expected).norm() / expected.norm()
        if not apart <= TOLERANCE[dtype]:
            return "their results differ here"
    return kernels


class ProductKernels:
    """Products of rows of one dtype, on a CPU, with one kind of packed weights."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, weights: Weights):
        self.dtype = dtype
        self.weights = weights
        name = f"{weights}_{DTYPES[dtype]}"
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._pack, self.multiply = getattr(library, f"pack_{name}"), getattr(library, f"product_{name}")
        self._pack.argtypes = (pointer, number, number, pointer, threads)
        self.multiply.argtypes = (ctypes.POINTER(ProductArguments), number, threads)
        self._pack.restype = self.multiply.restype = None
        library.panel_columns.restype = number
        self._panel: int = library.panel_columns()  # outputs that are packed together

    def product(self, numbers: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> PackedProduct:
        """Return the function x -> scales (x @ numbers^T) + bias, [rows, inputs] -> [rows, outputs]. The numbers are packed, and
        not read again.

        Args: numbers [outputs, inputs], int8 or of the rows' dtype; bias, scales [outputs], added and multiplied in float32;
            scales count for int8 only.
        """
        numbers = numbers.detach().contiguous()
        outputs, inputs = numbers.shape
        padded = -(-outputs // self._panel) * self._panel
        packed = torch.empty(padded * (inputs + inputs % 2), dtype=numbers.dtype)
        self._pack(numbers.data_ptr(), inputs, outputs, packed.data_ptr(), torch.get_num_threads())
        factors, added = (torch.zeros(padded) for _ in range(2))
        if scales is not None:
            factors[:outputs] = scales
        if bias is not None:
            added[:outputs] = bias.detach()
        return PackedProduct(self, packed, factors, added, inputs, outputs)


class Int16Kernels:
    """Products of bfloat16 rows with bfloat16 weights, both rounded to whole numbers of 16 bits."""

    dtype = torch.bfloat16

    def __init__(self, products: Int16Products):
        self._products = products
        self.multiply = products.multiply

    def product(self, numbers: Tensor, bias: Tensor | None = None) -> PackedProduct:
        """Return the function x -> x @ numbers^T + bias, [rows, inputs] -> [rows, outputs]. The numbers are packed, and not read
        again. Args: numbers [outputs, inputs]; bias [outputs], added in float32."""
        packed = self._products.pack(numbers.detach())
        added = torch.zeros(self._products.padded(packed.vectors))
        if bias is not None:
            added[: packed.vectors] = bias.detach()
        return PackedProduct(self, packed.numbers, packed.scales, added, packed.depth, packed.vectors)


@cache
def load_int16_kernels() -> Int16Kernels | str:
    """Load the products of whole numbers. Returns: them, or why not."""
    found = load_int16_products()
    return found if isinstance(found, str) else Int16Kernels(found)


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct:
    """The product of rows with packed weights, which the kernels' ``product`` makes."""

    kernels: ProductKernels | Int16Kernels
    packed: Tensor
    factors: Tensor
    added: Tensor
    inputs: int
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.kernels.dtype).contiguous()
        y = x.new_empty(len(x), self.outputs)
        # Profiles see torch's operations only; telling them takes as long as a product of one row otherwise.
        with record_function(NAME) if torch._C._autograd._profiler_enabled() else nullcontext():
            self.kernels.multiply(self.arguments(x.data_ptr(), y.data_ptr()), len(x), torch.get_num_threads())
        return y

    def arguments(self, x: int, y: int) -> ctypes.Structure:
        """Return the arguments of ``kernels.multiply`` for rows that begin at these addresses."""
        weights = self.packed.data_ptr(), self.factors.data_ptr(), self.added.data_ptr()
        return ProductArguments(x, *weights, self.inputs, self.outputs, y)
