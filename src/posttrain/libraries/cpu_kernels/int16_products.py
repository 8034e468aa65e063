"""Products of bfloat16 matrices by whole numbers of 16 bits (int16_products.cpp), for processors that multiply these faster.

Every matrix is rounded first, block by block of its depth, with errors of about 1e-4 of a block's norm; sums are exact, or
float32. So a product of bfloat16 matrices is ten times closer to the exact one than if its result were rounded to bfloat16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.processor import multiplies_int16_faster

SOURCE = Path(__file__).with_name("int16_products.cpp")
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
TOLERANCE = 3e-4  # largest distance of products to those in float64, of their norm
TRIALS = ((1, 40, 33), (100, 70, 411))  # rows, columns, depth


class ProductArguments(ctypes.Structure):
    """Arguments of a product with packed columns, laid out like in int16_products.cpp and in products.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "scales", "biases")),
        *((name, ctypes.c_int64) for name in ("depth", "columns")),
        ("y", ctypes.c_void_p),
    )


class _Packed(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("depth", ctypes.c_int64))


@dataclass(frozen=True, slots=True, eq=False)
class Int16Matrix:
    """Vectors [vectors, depth] that are rounded and packed."""

    numbers: Tensor  # int16
    scales: Tensor  # float32
    vectors: int
    depth: int

    def argument(self) -> ctypes.Structure:
        return _Packed(self.numbers.data_ptr(), self.scales.data_ptr(), self.depth)


class Int16Products:
    """Products of float32 or bfloat16 matrices on a CPU. A row's results do not depend on the other rows, to the bit. Of a
    vector that is not finite the results are NaN."""

    def __init__(self, library: ctypes.CDLL):
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._pack, self._product, self._packed_product = (
            {dtype: getattr(library, f"{function}_{name}") for dtype, name in DTYPES.items()}
            for function in ("pack", "product", "packed_product")
        )
        arguments, packed = ctypes.POINTER(ProductArguments), ctypes.POINTER(_Packed)
        for dtype in DTYPES:
            self._pack[dtype].argtypes = (pointer, number, flag, number, packed, flag)
            self._product[dtype].argtypes = (arguments, number, flag)
            self._packed_product[dtype].argtypes = (arguments, packed, number, flag)
        self._wide = library.product_wide
        self._wide.argtypes = (arguments, number, flag)
        self.multiply = self._product[torch.bfloat16]  # of bfloat16 rows: (ProductArguments, rows, threads)
        sizes = library.panel_columns, library.padded_depth, library.scales_of_depth
        for size in sizes:
            size.restype = number
        for size in sizes[1:]:
            size.argtypes = (number,)
        self.panel: int = library.panel_columns()  # vectors that are packed together
        self._padded, self._scales = sizes[1:]

    def pack(self, matrix: Tensor) -> Int16Matrix:
        """Round and pack a matrix [vectors, depth], which may be another one's transpose. It is not read again."""
        if matrix.stride(1) != 1 and matrix.stride(0) != 1:
            matrix = matrix.contiguous()
        vectors, depth = matrix.shape
        rows = matrix.stride(1) == 1
        padded = self.padded(vectors)
        numbers = torch.empty(padded * self._padded(depth), dtype=torch.int16)
        packed = Int16Matrix(numbers, torch.empty(padded * self._scales(depth)), vectors, depth)
        stride = matrix.stride(0) if rows else matrix.stride(1)
        self._pack[matrix.dtype](matrix.data_ptr(), stride, not rows, vectors, packed.argument(), _threads())
        return packed

    def padded(self, vectors: int) -> int:
        """The number of vectors of whole panels."""
        return -(-vectors // self.panel) * self.panel

    def product(self, x: Tensor, columns: Int16Matrix, *, wide: bool = False) -> Tensor:
        """Return x @ columns^T, [rows, vectors], in float32 where it is to be ``wide``, else in the dtype of x. Args: x
        [rows, depth]."""
        x = x.contiguous()
        y = x.new_empty(len(x), columns.vectors, dtype=torch.float32 if wide else x.dtype)
        multiply = self._wide if wide and x.dtype == torch.bfloat16 else self._product[x.dtype]
        multiply(_arguments(x.data_ptr(), columns, y), len(x), _threads())
        return y

    def packed_product(self, rows: Int16Matrix, columns: Int16Matrix, dtype: torch.dtype) -> Tensor:
        """Return rows @ columns^T, [vectors of rows, vectors of columns], in one of DTYPES."""
        y = torch.empty(rows.vectors, columns.vectors, dtype=dtype)
        self._packed_product[dtype](_arguments(0, columns, y), rows.argument(), rows.vectors, _threads())
        return y


def _arguments(x: int, columns: Int16Matrix, y: Tensor) -> ctypes.Structure:
    packed = columns.numbers.data_ptr(), columns.scales.data_ptr()
    return ProductArguments(x, *packed, None, columns.depth, columns.vectors, y.data_ptr())


def _threads() -> int:
    return torch.get_num_threads()


@cache
def load_int16_products() -> Int16Products | str:
    """Load the kernels, compiling them if necessary, and compare them with products in float64. Returns: them, or why not."""
    if not multiplies_int16_faster():
        return "the processor does not multiply whole numbers of 16 bits faster than bfloat16 numbers"
    library = compiled_library(SOURCE)
    if isinstance(library, str):
        return library
    if not hasattr(library, "product_wide"):
        return "the compiler does not use this processor's instructions for whole numbers of 16 bits (AVX-512 VNNI)"
    products = Int16Products(library)
    return products if _agree(products) else "their results differ here"


@torch.inference_mode(False)
@torch.no_grad()
def _agree(products: Int16Products) -> bool:
    random = torch.Generator().manual_seed(0)
    for rows, columns, depth in TRIALS:
        for dtype in DTYPES:
            left, right = (torch.randn(size, depth, generator=random).to(dtype) for size in (rows, columns))
            right[:, 1] *= 100
            packed, exact = products.pack(right), left.double() @ right.double().T
            turned, turned_right = (products.pack(each.T.contiguous().T) for each in (left, right))
            for found in (
                products.product(left, packed, wide=True),
                products.packed_product(products.pack(left), packed, torch.float32),
                products.packed_product(turned, turned_right, torch.float32),
            ):
                if not (found.double() - exact).norm() <= TOLERANCE * exact.norm():
                    return False
    return True
