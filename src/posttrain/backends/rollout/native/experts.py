"""A mixture of experts: every expert multiplies the rows that were sent to it, together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from posttrain.backends.rollout.native.kernel_parts import KernelGated, KernelParts, Rows
from posttrain.backends.rollout.native.kernels import ExpertsArguments, GateForm, GateKind, Kernels
from posttrain.backends.rollout.native.packed_products import NAME, PackedProduct, Product

Stacked = tuple[Tensor, Tensor | None]  # weight [outputs, inputs] and bias [outputs] of an expert

WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}


def mixture(
    *,
    router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    gate_up: Sequence[Product],
    activation: Rows,
    down: Sequence[Product],
    fewest_rows: int,
    shared: Rows | None = None,
    shared_gate: nn.Module | None = None,
) -> Rows:
    """Return the function [rows, hidden] -> [rows, hidden] of a mixture of experts.

    Args: router, the model's own, returns logits, weights [rows, chosen] and numbers of the chosen experts [rows, chosen];
        gate_up, down: products of each expert, of ``fewest_rows`` at least; shared: an expert for all rows, times the sigmoid of
        its gate where it has one.
    """

    compiled = _CompiledExperts.of(gate_up, activation, down)

    def mixed(rows: Tensor) -> Tensor:
        _, weights, chosen = router(rows)
        output = dealt_out(rows, weights, chosen) if compiled is None else compiled(rows, weights, chosen)
        if shared is not None:
            common = shared(rows)
            output += common if shared_gate is None else torch.sigmoid(shared_gate(rows)) * common
        return output

    def dealt_out(rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        each = chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)  # entry row * chosen + n, by its expert
        counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
        found = rows.new_empty(len(by_expert), rows.shape[1])
        for expert, places in enumerate(by_expert.split(counts)):
            count = counts[expert]
            if count:
                filled = torch.cat([places, places[:1].expand(max(0, fewest_rows - count))])
                found[places] = down[expert](activation(gate_up[expert](rows[filled // each])))[:count]
        # Summed in float32 and rounded once
        return (found.view(len(rows), each, -1) * weights[..., None].float()).sum(dim=1).to(rows.dtype)

    return mixed


class _CompiledExperts:
    """The experts of a mixture as one call of compiled code. Its products are those of the loop to the bit."""

    def __init__(self, gate: KernelGated, first: Sequence[PackedProduct], last: Sequence[PackedProduct]):
        assert isinstance(gate.kernels, Kernels)
        self.form, self.kernels, self.products = gate.form, gate.kernels, first[0].kernels
        self.first, self.last = first, last  # whose memory is read
        kind = type(first[0].arguments(0, 0))
        self.of_first, self.of_last = (
            (kind * len(first))(*(product.arguments(0, 0) for product in products)) for products in (first, last)
        )

    @classmethod
    def of(cls, first: Sequence[Product], gate: Rows, last: Sequence[Product]) -> _CompiledExperts | None:
        """Return experts all of whose parts are compiled for rows of the kernels' dtype; None for others."""
        if not isinstance(gate, KernelGated) or not isinstance(gate.kernels, Kernels):
            return None
        packed = [product for product in (*first, *last) if isinstance(product, PackedProduct)]
        dtype, hidden = gate.kernels.dtype, packed[0].inputs if packed else 0
        if len(packed) < len(first) + len(last) or hidden < gate.kernels.narrowest:
            return None
        if any(product.kernels is not packed[0].kernels or product.kernels.dtype != dtype for product in packed):
            return None
        return cls(gate, packed[: len(first)], packed[len(first) :])

    def __call__(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return the sums of the chosen experts' results. Args: rows [N, hidden]; shares, chosen [N, each]."""
        rows, shares, chosen = (
            rows.to(self.kernels.dtype).contiguous(),
            shares.float().contiguous(),
            chosen.contiguous(),
        )
        width, each = self.last[0].inputs, chosen.shape[1]
        output, entries = torch.empty_like(rows), len(rows) * each
        room = [rows.new_empty(entries, columns) for columns in (rows.shape[1], 2 * width, width, rows.shape[1])]
        given = ExpertsArguments(
            *(each.data_ptr() for each in (rows, output, chosen, shares)),
            ctypes.addressof(self.of_first),
            ctypes.addressof(self.of_last),
            *(each.data_ptr() for each in room),
            ctypes.cast(self.products.multiply, ctypes.c_void_p),
            rows.shape[1],
            width,
            each,
            len(self.first),
            *self.form,
        )
        with record_function(NAME) if torch._C._autograd._profiler_enabled() else nullcontext():
            self.kernels.functions["mix_experts"](given, len(rows), torch.get_num_threads())
        return output


def are_experts(module: Any) -> bool:
    """Return True for stacked weights [experts, outputs, inputs], or with both turned around, of gate and up together and of
    down; with biases [experts, outputs] or without."""
    names = {name for name, _ in module.named_parameters()}
    if names not in (WEIGHTS, WEIGHTS | BIASES) or not hasattr(module, "_apply_gate"):
        return False
    down, both = module.down_proj.shape, module.gate_up_proj.shape
    (experts, width, hidden) = down if _is_transposed(module) else (down[0], down[2], down[1])
    return tuple(both) == ((experts, hidden, 2 * width) if _is_transposed(module) else (experts, 2 * width, hidden))


def gate_ups(module: Any, *, apart: bool) -> Iterator[Stacked]:
    """Yield the first product of each expert. Args: apart: gates come before the other factors, also where the model has them
    side by side, which copies them."""
    of_bias = module.gate_up_proj_bias.detach() if has_biases(module) else None
    for number, weight in enumerate(module.gate_up_proj.detach()):
        stacked = weight.T if _is_transposed(module) else weight
        bias = None if of_bias is None else of_bias[number]
        if apart and alternate(module):
            stacked = torch.cat([stacked[::2], stacked[1::2]])
            bias = None if bias is None else torch.cat([bias[::2], bias[1::2]])
        yield stacked, bias


def downs(module: Any) -> Iterator[Stacked]:
    """Yield the last product of each expert."""
    of_bias = module.down_proj_bias.detach() if has_biases(module) else None
    for number, weight in enumerate(module.down_proj.detach()):
        yield weight.T if _is_transposed(module) else weight, None if of_bias is None else of_bias[number]


def alternate(module: Any) -> bool:
    """Return True where the outputs of gate and up lie side by side: gate, up, gate, up, ..."""
    return not getattr(module, "is_concatenated", True)


def has_biases(module: Any) -> bool:
    """Return True for products with biases."""
    return hasattr(module, "down_proj_bias")


def _is_transposed(module: Any) -> bool:
    return bool(getattr(module, "is_transposed", False))


def activation_of(module: Any, parts: KernelParts, *, apart: bool) -> Rows:
    """Return the activation between the products of each expert. Args: apart: rows begin with all gates, as ``gate_ups`` has
    them."""
    width = module.down_proj.shape[1 if _is_transposed(module) else 2]
    if hasattr(module, "act_fn") and type(module)._apply_gate.__module__ != type(module).__module__:
        return parts.gated(module.act_fn, width)

    def by_module(gate_up: Tensor) -> Tensor:
        if apart and alternate(module):
            gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1)
        found: Tensor = module._apply_gate(gate_up)
        return found

    slope, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if not isinstance(slope, float | int) or not isinstance(limit, float | int) or (alternate(module) and not apart):
        return by_module
    form = GateForm(GateKind.CLAMPED, float(slope), float(limit))
    return parts.own_gate(by_module, width, form, module.down_proj.device)
