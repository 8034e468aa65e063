"""Functions between a model's matrix products with explicit backward passes: by compiled kernels, or by torch's operations where
there are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import silu

from posttrain.libraries.cpu_kernels.load import kernels_for, load_update_kernels
from posttrain.libraries.cpu_kernels.update import NormForm, UpdateKernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm = NormForm.ROUNDED) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times the weight in one of the forms, over the last dimension; arXiv:1910.07467, equation 4.

    The mean is computed in float32 at least.

    Args: x [..., H]; weight [H], of the same dtype. Returns: [..., H] in the dtype of x.
    """
    output: Tensor = _RmsNorm.apply(x, weight, eps, form)
    return output


def gated(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    """silu (or gelu, approximated by tanh) of gate, times up.

    Args: gate, up [..., width]. Returns: [..., width].
    """
    if kernels_for(gate, up) is None:
        return (torch_gelu(gate, approximate="tanh") if gelu else silu(gate)) * up
    output: Tensor = _Gated.apply(gate, up, gelu)
    return output


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-second half, first half of x) sin, for every head; only where there are kernels.

    Args: x [1, heads, tokens, dim]; cos, sin [1, tokens, dim]. Returns: [1, heads, tokens, dim], tokens first in memory.
    """
    output: Tensor = _Rotated.apply(x, cos, sin)
    return output


class _RmsNorm(torch.autograd.Function):
    """RMS norm. Backward, with n = x / rms and gradients g of the output, w of the norm: dx = (g w - n mean(g w n)) / rms.

    torch has a fused backward pass of layer norm. Given a mean of 0, it computes (g w - mean(g w) - n mean(g w n)) / rms, so the
    term with mean(g w), which only a layer norm has, is added back. On a CPU this took a third of the time of separate
    operations; the kernels take a fraction of that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        ctx.form = form
        kernels = kernels_for(x, weight)
        if kernels is not None:
            x, weight = x.contiguous(), weight.contiguous()
            output, scale = kernels.norm_forward(x, weight, eps, form)
            ctx.save_for_backward(x, weight, scale)
            return output
        wide = x.to(_at_least_float32(x))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * scale if wide is x else wide.mul_(scale)
        ctx.save_for_backward(x, weight, scale)
        if form == NormForm.ROUNDED:
            return normed.to(x.dtype).mul_(weight)
        return normed.mul_(_gain(weight, form, wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        kernels = kernels_for(x, weight, grad)
        if kernels is not None and scale.dim() == 1:
            grad_x, grad_weight = kernels.norm_backward(
                grad.contiguous(), x, weight, scale, ctx.form, for_x=for_x, for_weight=for_weight
            )
            return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None
        exact, size = _at_least_float32(x), x.shape[-1]
        if scale.dim() == 1:
            scale = scale.view(*x.shape[:-1], 1)
        wide, grad, gain = x.to(exact).contiguous(), grad.to(exact).contiguous(), _gain(weight, ctx.form, exact)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, wide, [size], torch.zeros_like(scale), scale, gain, None, [for_x, for_weight, False]
        )
        if for_x:
            grad_x = grad_x.add_((grad @ gain)[..., None].div_(size).mul_(scale)).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype) if for_weight else None, None, None


class _Gated(torch.autograd.Function):
    """Keeps what an activation keeps, and computes it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.gelu = gelu
        ctx.save_for_backward(gate, up)
        return _kernels(gate).gated_forward(_rows(gate), _rows(up), gelu=gelu).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        shape, width = gate.shape, gate.shape[-1]
        both = _kernels(gate).gated_backward(_rows(grad.contiguous()), _rows(gate), _rows(up), gelu=ctx.gelu)
        of_gate, of_up = both if both.dim() == 3 else both.split(width, dim=1)
        return of_gate.view(shape), of_up.view(shape), None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[0].contiguous(), sin[0].contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad, *ctx.saved_tensors, backward=True), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _kernels(x).rotate(x[0].transpose(0, 1), cos, sin, backward=backward).transpose(0, 1)[None]


def _kernels(x: Tensor) -> UpdateKernels:
    """Return the kernels, whether or not they are allowed by now: those of a forward pass are there in its backward pass."""
    found = load_update_kernels(x.dtype)
    assert isinstance(found, UpdateKernels)
    return found


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width], contiguous in a row."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _gain(weight: Tensor, form: NormForm, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + 1.0 if form == NormForm.ONE_MORE else weight.to(dtype)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
