"""Faster float32 matrix products on CPUs where torch's default library is slow."""

from __future__ import annotations

from functools import cache

import torch

from posttrain.libraries.processor import processor

# torch multiplies float32 matrices with MKL, which does not use the widest instructions of AMD's processors; oneDNN, which
# torch uses for bfloat16, does. With an AVX-512 Zen core, products of a model took less than half the time (docs/benchmarks.md).
SLOW_WITH_MKL = "AuthenticAMD"


def choose_float32_products() -> bool:
    """Let oneDNN multiply float32 matrices in this process, where that is faster and exact. Returns: True when it does.

    torch passes them to oneDNN when rounding factors to bfloat16 is permitted (fp32_precision). oneDNN rounds only where the
    processor has instructions that need it (Intel's AMX); elsewhere it computes in float32. One test per process detects
    rounding; when it is found, nothing changes.
    """
    if not torch.backends.mkldnn.is_available() or SLOW_WITH_MKL not in processor() or not _one_dnn_is_exact():
        return False
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    return True


@cache
def _one_dnn_is_exact() -> bool:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return products_are_exact()
    finally:
        matmul.fp32_precision = before


def products_are_exact() -> bool:
    """Return True when products of float32 matrices, of several shapes, are exact: within 2e-6 of float64, where factors
    rounded to bfloat16 would deviate by 2e-3."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((1, 64, 64), (8, 256, 128), (128, 96, 256), (512, 64, 512)):
        left, right = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
        batches = torch.randn(4, rows, inner, generator=generator), torch.randn(4, inner, columns, generator=generator)
        for found, exact in (
            (left @ right.T, left.double() @ right.double().T),
            (torch.nn.functional.linear(left, right), left.double() @ right.double().T),
            (batches[0] @ batches[1], batches[0].double() @ batches[1].double()),
        ):
            if not (found - exact).norm() < 2e-6 * exact.norm():
                return False
    return True
