"""Mixtures of experts: as one call of compiled code, and expert by expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from posttrain.backends.rollout.native.experts import _CompiledExperts, mixture
from posttrain.backends.rollout.native.kernel_parts import KernelGated
from posttrain.backends.rollout.native.kernels import GateForm, GateKind, load_kernels
from posttrain.backends.rollout.native.packed_products import load_product_kernels

EXPERTS, EACH, HIDDEN, WIDTH = 5, 2, 37, 19
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
CLAMPED = GateForm(GateKind.CLAMPED, 1.702, 7.0)


def gate_of(form: GateForm) -> Callable[[Tensor, Tensor], Tensor]:
    if form == CLAMPED:
        return lambda gate, up: gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid() * (up.clamp(-7, 7) + 1)
    return lambda gate, up: silu(gate) * up


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("form", [GateForm(), CLAMPED])
def test_compiled_experts_compute_what_each_expert_computes(dtype: torch.dtype, rows: int, form: GateForm) -> None:
    """Of odd widths, with biases, and with an expert that no row goes to; beside float64, and beside the loop."""
    kernels, products = load_kernels(dtype), load_product_kernels(dtype, "whole")
    if isinstance(kernels, str) or isinstance(products, str):
        pytest.skip(f"{kernels}, {products}")
    random = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    first, last = drawn(EXPERTS, 2 * WIDTH, HIDDEN), drawn(EXPERTS, HIDDEN, WIDTH)
    biases = drawn(EXPERTS, 2 * WIDTH), drawn(EXPERTS, HIDDEN)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=random)[:EACH] for _ in range(rows)])
    x, shares = drawn(rows, HIDDEN), torch.rand(rows, EACH, generator=random)
    packed = [
        [products.product(*each) for each in zip(weights, bias, strict=True)]
        for weights, bias in zip((first, last), biases, strict=True)
    ]
    gate = KernelGated(kernels, form)
    compiled = _CompiledExperts.of(packed[0], gate, packed[1])
    assert compiled is not None

    expected = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row in range(rows):
        for n, expert in enumerate(chosen[row].tolist()):
            both = first[expert].double() @ x[row].double() + biases[0][expert].double()
            between = gate_of(form)(*both.chunk(2))
            expected[row] += shares[row, n] * (last[expert].double() @ between + biases[1][expert].double())

    def by_calls(numbers: Tensor) -> Tensor:  # no kernel is known behind it
        return gate(numbers)

    for activation in (gate, by_calls):
        mixed = mixture(
            router=lambda given: (given, shares, chosen),
            gate_up=packed[0],
            activation=activation,
            down=packed[1],
            fewest_rows=1,
        )
        found = mixed(x)
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert torch.equal(compiled(x, shares, chosen)[:1], compiled(x[:1], shares[:1], chosen[:1]))
