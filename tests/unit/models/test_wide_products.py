"""bfloat16 layers that are multiplied as other numbers give what the layers give, rounded once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from posttrain.libraries.cpu_kernels.load import int16_products_for, without_kernels
from posttrain.models import wide_products
from posttrain.models.wide_products import FEWEST_ROWS, wide_linear, widen_products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_values_and_gradients_are_the_exact_ones_rounded_once(whole_numbers: bool, bias: bool) -> None:
    torch.manual_seed(0)
    if whole_numbers and int16_products_for(torch.ones(1).bfloat16()) is None:
        pytest.skip("this processor multiplies them no faster")
    with nullcontext() if whole_numbers else without_kernels():
        _exact_but_rounded_once(bias, 1e-4 if whole_numbers else 0)


def _exact_but_rounded_once(bias: bool, rounding: float) -> None:
    sizes = ((2, 5, 32), (48, 32), (48,))
    tensors = [torch.randn(size).bfloat16().requires_grad_() for size in sizes[: 2 + bias]]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    output = wide_linear(*tensors[:2], tensors[2] if bias else None)
    true = nn.functional.linear(*exact)
    grad = torch.randn(true.shape).bfloat16()
    output.backward(grad)
    true.backward(grad.double())
    for ours, theirs in ((output, true), *((one.grad, other.grad) for one, other in zip(tensors, exact, strict=True))):
        assert ours.dtype == torch.bfloat16
        # Half a step of bfloat16's 8 digits, and roundings of numbers that cancel: float32's, and whole numbers'
        apart = 1e-5 + 6 * rounding * theirs.square().mean().sqrt()
        assert (ours.double() - theirs).abs().le(theirs.abs() * 2**-8 + apart).all()


def test_only_what_is_asked_for() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16().requires_grad_()
    wide_linear(x, weight, None).sum().backward()
    assert x.grad is None and weight.grad is not None


@pytest.mark.parametrize("slowly", [True, False])
def test_layers_of_a_model(slowly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "multiplies_bfloat16_slowly", lambda: slowly)
    asked: list[torch.Size] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append(weight.shape)
        return wide_linear(x, weight, bias)

    monkeypatch.setattr(wide_products, "wide_linear", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16, bias=False)).bfloat16()
    x = torch.randn(FEWEST_ROWS, 16).bfloat16()
    plain = model(x)
    assert widen_products(model) == (2 if slowly else 0)
    torch.testing.assert_close(model(x), plain, rtol=0.02, atol=0.02)
    assert len(asked) == (2 if slowly else 0)
    model(x[1:])  # too few rows to copy the weights for
    assert len(asked) == (2 if slowly else 0)
    model.float()  # a layer of another dtype multiplies as it did
    model(x.float())
    assert len(asked) == (2 if slowly else 0)
