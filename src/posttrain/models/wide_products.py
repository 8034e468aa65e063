"""Linear layers of bfloat16 whose products are computed in float32, on processors where that takes less time."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posttrain.libraries.processor import multiplies_bfloat16_slowly

# With fewer, copying the weight costs more than is gained: 16 rows take 1.2 to 1.4 times as long, 128 rows half to two thirds.
FEWEST_ROWS = 64


def widen_products(model: nn.Module) -> int:
    """Let the linear layers of ``model`` multiply bfloat16 numbers in float32, where the processor does that faster. Inputs,
    weights and results stay bfloat16, rounded once; parameters, names and hooks stay. Returns: the number of layers."""
    if not multiplies_bfloat16_slowly():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for bfloat16 tensors, by products of float32 copies.

    Args: x [..., in]; weight [out, in]; bias [out]. Returns: [..., out].
    """
    output: Tensor = _WideLinear.apply(x, weight, bias)
    return output


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight = self.weight.detach()
    known = type(weight) is Tensor and weight.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16
    if known and x.numel() >= FEWEST_ROWS * self.in_features:
        return wide_linear(x, self.weight, self.bias)
    return nn.Linear.forward(self, x)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        output = _rows(x) @ weight.float().T
        if bias is not None:
            output += bias
        return output.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = _rows(grad)
        of_x = (rows @ weight.float()).to(x.dtype).view(x.shape) if for_x else None
        of_weight = (rows.T @ _rows(x)).to(weight.dtype) if for_weight else None
        return of_x, of_weight, rows.sum(dim=0).to(weight.dtype) if for_bias else None


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width] float32."""
    return x.reshape(-1, x.shape[-1]).float()
