"""Linear layers of bfloat16 on processors that multiply other numbers faster: whole ones of 16 bits, or float32."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posttrain.libraries.cpu_kernels.load import int16_products_for
from posttrain.libraries.processor import multiplies_bfloat16_slowly

# With fewer, copying the weight costs more than is gained: 16 rows take 1.2 to 1.4 times as long, 128 rows half to two thirds.
FEWEST_ROWS = 64


def widen_products(model: nn.Module) -> int:
    """Let the linear layers of ``model`` multiply bfloat16 numbers as others, where the processor does that faster. Inputs,
    weights and results stay bfloat16, rounded once; parameters, names and hooks stay. Returns: the number of layers."""
    if not multiplies_bfloat16_slowly():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for bfloat16 tensors, by products of whole numbers where there are kernels, else of float32 copies.

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
        kernels = int16_products_for(x, weight)
        if kernels is None:
            output = _rows(x).float() @ weight.float().T
        else:
            output = kernels.product(_rows(x), kernels.pack(weight), wide=bias is not None)
        if bias is not None:
            output += bias
        return output.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows, of_x, of_weight = _rows(grad), None, None
        kernels = int16_products_for(grad, x, weight)
        if kernels is None:
            wide = rows.float()
            of_x = (wide @ weight.float()).to(x.dtype) if for_x else None
            of_weight = (wide.T @ _rows(x).float()).to(weight.dtype) if for_weight else None
        else:
            if for_x:
                of_x = kernels.product(rows, kernels.pack(weight.T))
            if for_weight:
                of_weight = kernels.packed_product(kernels.pack(rows.T), kernels.pack(_rows(x).T), weight.dtype)
        of_bias = rows.sum(dim=0, dtype=torch.float32).to(weight.dtype) if for_bias else None
        return None if of_x is None else of_x.view(x.shape), of_weight, of_bias


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width]."""
    return x.reshape(-1, x.shape[-1])
