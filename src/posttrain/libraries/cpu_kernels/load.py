"""The update's kernels of this process, loaded once they have been compared with torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from posttrain.libraries.cpu_kernels.attention import AttentionKernels, load_attention
from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.cpu_kernels.int16_products import Int16Products, load_int16_products
from posttrain.libraries.cpu_kernels.trial import difference
from posttrain.libraries.cpu_kernels.update import DTYPES, SOURCE, UpdateKernels

_allowed = True


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute by torch's operations inside the ``with`` block, to compare."""
    before = _allowed
    allow_kernels(False)
    try:
        yield
    finally:
        allow_kernels(before)


def allow_kernels(allowed: bool) -> None:
    """Let this process use its kernels, or not."""
    global _allowed
    _allowed = allowed


def kernels_for(*tensors: Tensor) -> UpdateKernels | None:
    """Return the kernels for tensors of one dtype on the CPU; None where torch's operations are to be used."""
    found = load_update_kernels(tensors[0].dtype) if _may_take(tensors) else None
    return found if isinstance(found, UpdateKernels) else None


def attention_for(query: Tensor, key: Tensor, value: Tensor) -> AttentionKernels | None:
    """Return the kernels for attention of [tokens, heads, dim]; None where torch's operations are to be used."""
    found = load_attention(query.dtype) if _may_take((query, key, value)) else None
    return found if isinstance(found, AttentionKernels) and found.takes(query, key) else None


def int16_products_for(*tensors: Tensor) -> Int16Products | None:
    """Return the kernels for products of bfloat16 matrices on the CPU; None where torch's are faster, or to be used."""
    found = load_int16_products() if tensors[0].dtype == torch.bfloat16 and _may_take(tensors) else None
    return found if isinstance(found, Int16Products) else None


def _may_take(tensors: tuple[Tensor, ...]) -> bool:
    first = tensors[0]
    if not _allowed or first.dtype not in DTYPES or type(first.detach()) is not Tensor:
        return False
    return all(each.device.type == "cpu" and each.dtype == first.dtype for each in tensors)


def why_no_kernels(dtype: torch.dtype) -> str | None:
    """Return the reason why there are no kernels on the CPU where they were wanted; None otherwise."""
    found = (load_update_kernels(dtype), load_attention(dtype)) if _allowed and dtype in DTYPES else ()
    return next((each for each in found if isinstance(each, str)), None)


@cache
def load_update_kernels(dtype: torch.dtype) -> UpdateKernels | str:
    """Load the kernels for tensors of ``dtype``, one of DTYPES, compiling them if necessary. Returns: them, or why not."""
    library = compiled_library(SOURCE)
    if isinstance(library, str):
        return library
    kernels = UpdateKernels(library, dtype)
    return difference(kernels) or kernels
