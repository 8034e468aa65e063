"""Products with packed weights are those of float64, and a row's do not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from posttrain.backends.rollout.native import packed_products, products
from posttrain.backends.rollout.native.int8 import int8_products
from posttrain.backends.rollout.native.packed_products import (
    TOLERANCE,
    ProductKernels,
    load_int16_kernels,
    load_product_kernels,
)
from posttrain.backends.rollout.native.products import copies_weights, product_kernels, stacked_product

ROWS = (0, 1, 2, 3, 5, 6, 7, 12, 13, 18, 19, 24, 25, 60, 95, 96, 97, 200)  # one to many groups, tiles and bands


@pytest.fixture
def fresh() -> Iterator[None]:
    load_product_kernels.cache_clear()
    yield
    load_product_kernels.cache_clear()


def compiled(dtype: torch.dtype = torch.bfloat16) -> ProductKernels:
    found = load_product_kernels(dtype, "whole")
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [1, 2, 63, 64, 576, 5001])
@pytest.mark.parametrize("outputs", [1, 16, 63, 64, 65, 300])
def test_products_are_those_of_float64(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    numbers, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(ROWS[-1], inputs).to(dtype)
    exact = x.double() @ numbers.double().T
    before = torch.get_num_threads()
    try:
        for added in (bias, None):
            multiply = compiled(dtype).product(numbers, added)
            expected = exact if added is None else exact + added.double()
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got = multiply(x)
                close = (got.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
                assert close, f"{threads} threads"
                for rows in ROWS:
                    assert torch.equal(multiply(x[:rows]), got[:rows]), f"{threads} threads, {rows} rows"
    finally:
        torch.set_num_threads(before)


def test_rows_with_weights_that_are_both_rounded_to_whole_numbers() -> None:
    kernels = load_int16_kernels()
    if isinstance(kernels, str):
        pytest.skip(kernels)
    numbers, bias, x = torch.randn(300, 576).bfloat16(), torch.randn(300).bfloat16(), torch.randn(97, 576).bfloat16()
    assert product_kernels(numbers) is kernels
    for added in (bias, None):
        multiply = kernels.product(numbers, added)
        got, expected = multiply(x), x.double() @ numbers.double().T + (0 if added is None else added.double())
        assert (got.double() - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
        assert torch.equal(torch.cat([multiply(row[None]) for row in x]), got)


def test_whole_numbers_by_hand() -> None:
    """(1, 2, 3) x (1, -1, 2) = 5, and 0.5 is added; with itself 14, and -1."""
    multiply = compiled().product(
        torch.tensor([[1, -1, 2], [1, 2, 3]]).bfloat16(), torch.tensor([0.5, -1.0]).bfloat16()
    )
    assert multiply(torch.tensor([[1, 2, 3]]).bfloat16()).tolist() == [[5.5, 13.0]]


@pytest.mark.parametrize("size", [2.0**-64, 2.0**-60, 2.0**60, 2.0**63])
def test_a_row_alone_has_the_same_bits_as_among_others_near_the_ends_of_float32(size: float) -> None:
    """Sums below the least normal number, 2^-126, and near the largest, 2^128."""
    weight, x = (size * torch.randn(70, 301)).bfloat16(), (size * torch.randn(13, 301)).bfloat16()
    for multiply in (compiled().product(weight), int8(weight)):
        together = multiply(x)
        assert together.any() and torch.equal(torch.cat([multiply(row[None]) for row in x]), together)


def int8(weight: torch.Tensor) -> packed_products.Product:
    make, why = int8_products(torch.bfloat16, torch.device("cpu"))
    assert why == ""
    return make([weight], [None])


def test_weights_and_rows_may_lie_apart_and_are_copied() -> None:
    weight, x = torch.randn(96, 40).bfloat16(), torch.randn(33, 9).bfloat16()
    multiply = compiled().product(weight.T[:, ::2][:, :33])
    expected = (x.T.double() @ weight.T[:, ::2][:, :33].double().T).bfloat16()
    weight.zero_()
    torch.testing.assert_close(multiply(x.T), expected, rtol=2**-6, atol=2**-6)


def test_what_is_not_finite_shows() -> None:
    weight = torch.ones(70, 8).bfloat16()
    weight[0, 1], weight[69, 2] = torch.nan, torch.inf
    finite = compiled().product(weight)(torch.ones(2, 8).bfloat16()).isfinite()
    assert finite.logical_not().nonzero().tolist() == [[0, 0], [0, 69], [1, 0], [1, 69]]


def test_other_products_and_tiles_are_the_matrix_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    assert product_kernels(torch.ones(2, 2).half()) is None and product_kernels(torch.ones(2, 2, device="meta")) is None
    weight = torch.randn(64, 96).bfloat16()
    assert product_kernels(weight) is not None and copies_weights([weight])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert product_kernels(weight) is None and product_kernels(weight.float()) is not None
    x = torch.randn(5, 96).bfloat16()
    torch.testing.assert_close(stacked_product([weight], [None])(x), x @ weight.T, rtol=2**-6, atol=2**-6)


@pytest.mark.usefixtures("fresh")
def test_kernels_that_are_wrong_or_missing_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    load_product_kernels.cache_clear()
    monkeypatch.setitem(packed_products.TOLERANCE, torch.bfloat16, 1e-9)
    assert load_product_kernels(torch.bfloat16, "whole") == "their results differ here"
    weight = torch.randn(64, 96).bfloat16()
    x = torch.randn(5, 96).bfloat16()
    torch.testing.assert_close(stacked_product([weight], [None])(x), x @ weight.T, rtol=2**-6, atol=2**-6)
    load_product_kernels.cache_clear()
    monkeypatch.setattr(packed_products, "compiled_library", lambda source: "no C++ compiler was found (install g++)")
    monkeypatch.setattr(products, "load_int16_kernels", lambda: "no C++ compiler was found (install g++)")
    assert load_product_kernels(torch.bfloat16, "whole") == "no C++ compiler was found (install g++)"
    assert products.product_kernels(weight) is None


@pytest.mark.usefixtures("fresh")
def test_a_processor_without_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "compiled_library", lambda source: object())
    found = load_product_kernels(torch.bfloat16, "whole")
    assert found == "the processor has no AVX-512 instructions for products of bfloat16"
