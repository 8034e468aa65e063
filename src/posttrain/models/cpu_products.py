"""float32 matrix products on CPUs for which torch's own library of them is slow."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

# torch multiplies float32 matrices with MKL, which does not use the widest instructions of AMD's processors; oneDNN, which torch
# has for bfloat16, does. With an AVX-512 Zen core products of a model's sizes took less than half the time (docs/benchmarks.md).
SLOW_WITH_MKL = "AuthenticAMD"


def choose_float32_products() -> bool:
    """Let oneDNN multiply float32 matrices from now on, in all of this process, where that is sooner and exact. Returns whether.

    torch hands them to oneDNN when it is allowed to round factors to bfloat16 (fp32_precision). oneDNN does that only where the
    processor has instructions that need it (Intel's AMX); elsewhere it computes in float32. Whether this one rounds is tried
    out, once in a process, and where it does, everything stays as it was.
    """
    if not torch.backends.mkldnn.is_available() or SLOW_WITH_MKL not in _processor() or not _one_dnn_is_exact():
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
    """Whether products of float32 matrices, of several shapes, are those of the numbers as they are: within 2e-6 of float64's,
    where factors in bfloat16 would be 2e-3 off."""
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


def _processor() -> str:
    """What the system tells about it; nothing where it is not Linux."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""
