"""The update's kernels compute what torch's operations compute, at odd sizes too, and are left out where they would not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from posttrain.libraries.cpu_kernels import load
from posttrain.libraries.cpu_kernels.load import kernels_for, load_update_kernels
from posttrain.libraries.cpu_kernels.trial import difference, norm
from posttrain.libraries.cpu_kernels.update import NormForm, UpdateKernels

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.01}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE))
SIZES = {"rows": st.sampled_from([0, 1, 2, 65, 200]), "width": st.sampled_from([1, 7, 16, 33, 96, 300])}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


def compiled(dtype: torch.dtype) -> UpdateKernels:
    found = load_update_kernels(dtype)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def assert_close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), exact.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@DTYPES
@given(**SIZES, form=st.sampled_from(NormForm))
@settings(max_examples=30, deadline=None)
def test_norm(dtype: torch.dtype, rows: int, width: int, form: NormForm) -> None:
    x, weight, grad = (torch.randn(size).to(dtype) for size in ((rows, width), (width,), (rows, width)))
    kernels = compiled(dtype)
    output, scales = kernels.norm_forward(x, weight, 1e-2, form)
    of_x, of_weight = kernels.norm_backward(grad, x, weight, scales, form, for_x=True, for_weight=True)
    true_x, true_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = norm(true_x, true_weight, form, 1e-2)
    exact.backward(grad.double())
    assert_close(output, exact.detach(), dtype)
    assert_close(of_x, true_x.grad, dtype)
    assert_close(of_weight, true_weight.grad, torch.float32)


@DTYPES
@given(**SIZES, is_gelu=st.booleans(), stacked=st.booleans())
@settings(max_examples=30, deadline=None)
def test_gated(dtype: torch.dtype, rows: int, width: int, is_gelu: bool, stacked: bool) -> None:
    both, grad = 3 * torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype)
    gate, up = both.split(width, dim=1) if stacked else (half.contiguous() for half in both.split(width, dim=1))
    kernels = compiled(dtype)
    true_gate, true_up = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = (gelu(true_gate, approximate="tanh") if is_gelu else silu(true_gate)) * true_up
    exact.backward(grad.double())
    assert_close(kernels.gated_forward(gate, up, gelu=is_gelu), exact.detach(), dtype)
    found = kernels.gated_backward(grad, gate, up, gelu=is_gelu)
    of_gate, of_up = found.split(width, dim=1) if found.dim() == 2 else found
    assert_close(of_gate, true_gate.grad, dtype)
    assert_close(of_up, true_up.grad, dtype)


@DTYPES
@pytest.mark.parametrize("dim", [2, 20, 64, 80, 96, 256])
def test_rotate(dtype: torch.dtype, dim: int) -> None:
    """Of heads in the middle of a product, and back: the transposed matrix takes the gradient."""
    x = torch.randn(7, 5, dim).to(dtype)[:, 1:4]
    cos, sin = torch.randn(2, 7, dim).to(dtype)
    true = x.double().requires_grad_()
    first, second = true.chunk(2, dim=-1)
    exact = true * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    exact.backward(x.double())
    assert_close(compiled(dtype).rotate(x, cos, sin), exact.detach(), dtype)
    assert_close(compiled(dtype).rotate(x, cos, sin, backward=True), true.grad, dtype)


def test_scores_by_hand() -> None:
    """Logits 0 and ln 3, halved: e is 1 / sqrt 3 and 1, and the target, the first, has x = 0."""
    tile, chosen = torch.tensor([[0.0, 2 * math.log(3)]]), torch.zeros(1)
    sums = tuple(torch.empty(4, 1))
    compiled(torch.float32).tile_forward(tile, 0.5, torch.tensor([10]), 10, chosen, sums)
    e = 1 / 3
    assert [float(each) for each in sums] == pytest.approx([math.log(3), 1 + e, -e * math.log(3), 1 + e * e])
    assert float(chosen) == 0.0


@DTYPES
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    kernels, x = compiled(dtype), torch.randn(3, 40).to(dtype)
    x[1, 39] = torch.nan
    weight, targets, a = torch.ones(40, dtype=dtype), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    output, scales = kernels.norm_forward(x, weight, 1e-5, NormForm.ROUNDED)
    of_x, _ = kernels.norm_backward(x, x, weight, scales, NormForm.ROUNDED, for_x=True, for_weight=False)
    sums = tuple(torch.empty(4, 3))
    kernels.tile_forward(x, 1.0, targets, 0, torch.zeros(3), sums)
    gradient = x.clone()
    rows_of = {"shift": sums[1], "of_logprobs": a, "of_entropy": None, "entropies": a, "at_target": a}
    kernels.tile_backward(gradient, 1.0, targets, 0, by=1.0, **rows_of)
    for rows in (output, of_x, sums[1][:, None], kernels.gated_forward(x, x, gelu=False), gradient):
        assert rows.isnan().any(dim=1).tolist() == [False, True, False]


@DTYPES
def test_no_bit_depends_on_the_threads(dtype: torch.dtype) -> None:
    kernels, x, weight = compiled(dtype), torch.randn(700, 130).to(dtype), torch.randn(130).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output, scales = kernels.norm_forward(x, weight, 1e-5, NormForm.ROUNDED)
            found.append(
                (output, *kernels.norm_backward(x, x, weight, scales, NormForm.ROUNDED, for_x=True, for_weight=True))
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


def test_wrong_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled(torch.bfloat16)
    assert difference(kernels) == ""
    right = UpdateKernels.gated_forward
    monkeypatch.setattr(UpdateKernels, "gated_forward", lambda *given, gelu: 1.02 * right(*given, gelu=gelu))
    assert difference(kernels) == "the compiled kernel for activations gives another result than torch"


def test_their_trial_may_be_made_by_the_sampler() -> None:
    with torch.inference_mode():
        assert difference(compiled(torch.bfloat16)) == ""


def test_where_there_are_kernels() -> None:
    x = torch.ones(2)
    compiled(torch.float32)
    assert kernels_for(x) is not None
    assert (
        kernels_for(x.double()) is None and kernels_for(x, x.bfloat16()) is None and kernels_for(x.to("meta")) is None
    )
    with load.without_kernels():
        assert kernels_for(x) is None
