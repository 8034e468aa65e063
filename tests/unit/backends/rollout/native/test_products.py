"""Packed products are linear layers, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from posttrain.backends.rollout.native.products import library_product, stacked_product


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_product_in_bfloat16(rows: int, bias: bool) -> None:
    weights = [torch.randn(n, 96).bfloat16() for n in (64, 32, 32)]
    biases = [torch.randn(64).bfloat16() if bias else None, None, None]
    x = torch.randn(rows, 96).bfloat16()
    with torch.inference_mode():
        got = stacked_product(weights, biases)(x)
    expected = torch.cat([linear(x, weight, b) for weight, b in zip(weights, biases, strict=True)], dim=1)
    # bfloat16 keeps 8 bits: sums made in another order may round to the neighbour
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)


def test_the_matrix_librarys_product_in_float32_reads_the_weights_themselves() -> None:
    weight = torch.randn(8, 4)
    product = library_product([weight], [None])
    x = torch.randn(3, 4)
    assert torch.equal(product(x), linear(x, weight))
    weight.zero_()
    assert not product(x).any()
    two = library_product([weight, torch.ones(2, 4)], [torch.ones(8), None])
    assert torch.equal(two(torch.ones(1, 4)), torch.tensor([[1.0] * 8 + [4.0] * 2]))
