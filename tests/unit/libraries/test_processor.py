"""Which processors multiply bfloat16 slower than other numbers, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.libraries import processor
from posttrain.libraries.processor import multiplies_bfloat16_slowly, multiplies_int16_faster

INTEL, AMD = "GenuineIntel", "AuthenticAMD"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    processor.processor.cache_clear()
    yield
    processor.processor.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "slowly", "int16"),
    [
        (INTEL, "avx2 avx512f avx512_bf16 avx512_vnni", True, True),
        (INTEL, "avx512f avx512bw", True, False),  # without any instruction for bfloat16
        (INTEL, "avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile", False, False),
        (INTEL, "avx2 fma avx_vnni", False, False),  # not measured
        (AMD, "avx512f avx512_bf16 avx512_vnni", False, False),
    ],
)
def test_by_vendor_and_flags(
    vendor: str, flags: str, slowly: bool, int16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(2 * f"processor: 0\nvendor_id\t: {vendor}\nmodel name\t: a\ncpu MHz: 1\nflags\t\t: {flags}\n\n")
    monkeypatch.setattr(processor, "CPUINFO", file)
    assert multiplies_bfloat16_slowly() == slowly
    assert multiplies_int16_faster() == int16


def test_without_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    assert processor.processor()
    assert not multiplies_bfloat16_slowly() and not multiplies_int16_faster()
