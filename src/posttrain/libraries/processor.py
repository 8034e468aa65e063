"""This machine's processor."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@cache
def processor() -> str:
    """Return a text that differs between processors with different instructions: machines may share a home folder."""
    if not CPUINFO.exists():
        return " ".join(os.uname())
    lines = set(CPUINFO.read_text().splitlines())
    return "\n".join(
        sorted(line for line in lines if line.startswith(("vendor_id", "flags", "Features", "model name")))
    )


def multiplies_bfloat16_slowly() -> bool:
    """Return True for processors on which products of float32 numbers take less time than those of as many bfloat16 numbers.

    Intel's with AVX-512 complete two instructions on 16 float32 numbers in a cycle, but one on 16 pairs of bfloat16 in two
    cycles: half as many products. Their fast products of bfloat16 are those of the tiles (AMX), which a virtual machine may hide.
    """
    words = set(processor().split())
    return "GenuineIntel" in words and "avx512f" in words and "amx_bf16" not in words


def multiplies_int16_faster() -> bool:
    """Return True for processors that complete products of pairs of whole numbers of 16 bits, added up in 32 bits, at twice the
    rate of float32 numbers, and those of bfloat16 numbers at half that rate."""
    return multiplies_bfloat16_slowly() and "avx512_vnni" in processor().split()
