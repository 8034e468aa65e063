"""Products of whole numbers of 16 bits are those of float64 but for roundings of 1e-4 of a block's norm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from posttrain.libraries.cpu_kernels import int16_products
from posttrain.libraries.cpu_kernels.int16_products import DTYPES, TOLERANCE, Int16Products, load_int16_products

ROWS = (0, 1, 2, 5, 6, 7, 13, 24, 25, 64, 65, 96, 97, 200)  # one to many groups, panels and bands
BLOCK = 192


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Int16Products]:
    """The kernels of any processor that has the instructions, also where others are as fast."""
    load_int16_products.cache_clear()
    monkeypatch.setattr(int16_products, "multiplies_int16_faster", lambda: True)
    found = load_int16_products()
    if isinstance(found, str):
        pytest.skip(found)
    yield found
    load_int16_products.cache_clear()


def close(found: Tensor, exact: Tensor) -> bool:
    return bool((found.double() - exact).norm() <= TOLERANCE * exact.norm())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("depth", [1, 2, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 576, 5001])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 300])
def test_products_are_those_of_float64(products: Int16Products, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS[-1], depth).to(dtype), torch.randn(columns, depth).to(dtype)
    exact = x.double() @ weight.double().T
    packed = products.pack(weight)
    wide = products.product(x, packed, wide=True)
    assert wide.dtype == torch.float32 and close(wide, exact)
    assert torch.equal(products.product(x, packed), wide.to(dtype))
    before = torch.get_num_threads()
    try:
        for rows in ROWS:  # each alone, by one thread or two: the same bits
            torch.set_num_threads(1 + rows % 2)
            assert torch.equal(products.product(x[:rows], packed, wide=True), wide[:rows])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products.packed_product(products.pack(x), packed, torch.float32), wide)
    # The squares of a column are added up in another order, so its scale may be another in its last digit.
    turned = [products.pack(each.T.contiguous().T) for each in (x, weight)]
    found = products.packed_product(turned[0], turned[1], torch.float32)
    assert close(found, exact)
    assert torch.equal(products.packed_product(turned[0], turned[1], torch.bfloat16), found.bfloat16())


def test_whole_numbers_by_hand(products: Int16Products) -> None:
    """(3, 4): the largest becomes 32767, so numbers are multiplied by 8191.75: 24575.25 is rounded to 24575. With itself:
    24575^2 + 32767^2 = 1677606914, by 8191.75^2 = 67104768.0625: 24.99982."""
    x = torch.tensor([[3.0, 4.0]])
    assert products.product(x, products.pack(x)).item() == pytest.approx(1677606914 / 67104768.0625, rel=1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 100, BLOCK, 5 * BLOCK])
def test_the_largest_sums_fit(products: Int16Products, depth: int) -> None:
    """A vector with itself has the largest sum that two of such norms can have; beyond 2^31 it would become negative."""
    signs = torch.randint(0, 2, (64, depth)) * 2.0 - 1
    for x in (torch.ones(64, depth), signs, signs * torch.rand(64, depth), signs * torch.rand(64, depth) ** 8):
        found, exact = products.product(x, products.pack(x)).diagonal(), x.double().square().sum(dim=1)
        assert torch.allclose(found.double(), exact, rtol=3e-4, atol=0)


def test_rounding_costs_a_ten_thousandth_of_a_blocks_norm(products: Int16Products) -> None:
    """Times columns of the unit matrix a product is the rounded vector itself: errors of sqrt(192 / 12) / 46320 = 8.6e-5 of its
    norm, whatever the size of single numbers."""
    x, unit = torch.randn(300, BLOCK), products.pack(torch.eye(BLOCK))
    spread = torch.randn(300, BLOCK) * torch.randn(300, BLOCK).mul(3).exp()
    for each in (x, spread):
        errors = (products.product(each, unit) - each).norm(dim=1) / each.norm(dim=1)
        assert errors.mean() < 1.1e-4 and errors.max() < 2e-4
        assert ((each.bfloat16().float() - each).norm(dim=1) / each.norm(dim=1)).mean() > 8 * errors.mean()


@pytest.mark.parametrize("size", [2.0**-108, 2.0**-60, 2.0**60, 2.0**108])
def test_numbers_near_the_ends_of_float32(products: Int16Products, size: float) -> None:
    x, weight = torch.rand(7, 301) * size, torch.rand(70, 301) / size
    assert close(products.product(x + size, products.pack(weight)), (x + size).double() @ weight.double().T)


def test_what_is_not_finite_shows_and_nothing_is_nothing(products: Int16Products) -> None:
    weight, x = torch.ones(70, 400), torch.ones(3, 400)
    weight[0, 1], weight[69, 399] = torch.nan, torch.inf
    weight[5] = 0
    x[2, 300] = -torch.inf
    for packed in (products.pack(weight), products.pack(weight.T.contiguous().T)):
        found = products.product(x, packed)
        assert found[:2].isnan().nonzero().tolist() == [[0, 0], [0, 69], [1, 0], [1, 69]]
        assert found[2].isnan().all() and not found[:2, 5].any()
    assert not products.product(torch.full((2, 400), 1e-40), products.pack(torch.ones(64, 400))).any()


def test_matrices_may_lie_apart_and_are_copied(products: Int16Products) -> None:
    weight, x = torch.randn(96, 80), torch.randn(5, 33)
    parts = weight.T[:, ::2][:, :33], weight[:, 2:35], weight[2:35].T, weight[::2, 1:34]
    for part in parts:
        exact, packed = x.double() @ part.double().T, products.pack(part)
        assert close(products.product(x, packed), exact)
        assert close(products.product(x.T.contiguous().T, packed), exact)


def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch, products: Int16Products) -> None:
    load_int16_products.cache_clear()
    monkeypatch.setattr(int16_products, "TOLERANCE", 1e-9)
    assert load_int16_products() == "their results differ here"
    load_int16_products.cache_clear()
    monkeypatch.setattr(int16_products, "compiled_library", lambda source: "no C++ compiler was found (install g++)")
    assert load_int16_products() == "no C++ compiler was found (install g++)"
    load_int16_products.cache_clear()
    monkeypatch.setattr(int16_products, "compiled_library", lambda source: object())
    assert str(load_int16_products()).startswith("the compiler does not use this processor's instructions")
    load_int16_products.cache_clear()
    monkeypatch.setattr(int16_products, "multiplies_int16_faster", lambda: False)
    assert str(load_int16_products()).startswith("the processor does not multiply")
