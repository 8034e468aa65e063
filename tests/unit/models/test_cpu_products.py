"""Which library multiplies float32 matrices: the faster one only where it does not round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from posttrain.models import cpu_products
from posttrain.models.cpu_products import choose_float32_products, products_are_exact

MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "none"
    cpu_products._one_dnn_is_exact.cache_clear()
    yield
    cpu_products._one_dnn_is_exact.cache_clear()
    MATMUL.fp32_precision = before


def test_exact_or_left_alone() -> None:
    chosen = choose_float32_products()
    assert MATMUL.fp32_precision == ("bf16" if chosen else "none")
    assert products_are_exact()


def test_rounded_factors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: multiply(a.bfloat16().to(a.dtype), b))
    assert not products_are_exact()
    monkeypatch.setattr(cpu_products, "processor", lambda: "vendor_id: AuthenticAMD")
    assert not choose_float32_products()
    assert MATMUL.fp32_precision == "none"


def test_other_processors_keep_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "processor", lambda: "vendor_id: GenuineIntel")
    assert not choose_float32_products()
    assert MATMUL.fp32_precision == "none"
