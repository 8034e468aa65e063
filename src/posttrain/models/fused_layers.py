"""Fused layers of transformers' models with explicit backward passes, for the CPU: the same numbers, faster.

The work between matrix products is bound by memory: every small operation reads and writes a whole tensor. Only modules of
exactly the classes listed here are changed, and only their forward pass; parameters, names and hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Classes with a fused forward pass, by full name: a subclass, or a class of a model's own code, may differ.
LLAMA_NORMS = {
    f"transformers.models.{family}.modeling_{family}.{name}RMSNorm"
    for family, name in {
        "granite": "Granite",
        "llama": "Llama",
        "mistral": "Mistral",
        "mixtral": "Mixtral",
        "phi3": "Phi3",
        "qwen2": "Qwen2",
        "qwen2_moe": "Qwen2Moe",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "smollm3": "SmolLM3",
    }.items()
}
GEMMA_NORMS = {
    f"transformers.models.{family}.modeling_{family}.{name}RMSNorm"
    for family, name in (("gemma", "Gemma"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3"))
}


def fuse_layers(model: nn.Module) -> int:
    """Replace the forward passes of the known layers of ``model``, in place. Returns: the number of layers."""
    forwards: dict[str, Callable[..., Tensor]] = {
        **dict.fromkeys(LLAMA_NORMS, _llama_norm),
        **dict.fromkeys(GEMMA_NORMS, _gemma_norm),
    }
    fused = 0
    for module in model.modules():
        kind = type(module)
        forward = forwards.get(f"{kind.__module__}.{kind.__qualname__}")
        if forward is not None:
            module.forward = MethodType(forward, module)
            fused += 1
    return fused


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; arXiv:1910.07467, equation 4.

    The mean is computed in float32 at least. A weight of x's dtype is multiplied after rounding to it, as in Llama; a wider
    one before, as in Gemma.

    Args: x [..., H]; weight [H]. Returns: [..., H] in the dtype of x.
    """
    output: Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:  # the result would have the wider dtype
        unfused: Tensor = type(self).forward(self, hidden_states)
        return unfused
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, 1.0 + self.weight.to(_at_least_float32(x)), self.eps)


class _RmsNorm(torch.autograd.Function):
    """RMS norm. Backward, with n = x / rms and gradients g of the output, w of the norm: dx = (g w - n mean(g w n)) / rms.

    torch has a fused backward pass of layer norm. Given a mean of 0, it computes (g w - mean(g w) - n mean(g w n)) / rms, so the
    term with mean(g w), which only a layer norm has, is added back. On a CPU this took a third of the time of separate
    operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(_at_least_float32(x))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * scale if wide is x else wide.mul_(scale)
        ctx.save_for_backward(x, weight, scale)
        if weight.dtype == x.dtype:
            return normed.to(x.dtype).mul_(weight)
        return normed.mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        exact, size = _at_least_float32(x), x.shape[-1]
        wide, grad, gain = x.to(exact).contiguous(), grad.to(exact).contiguous(), weight.to(exact)
        for_x, for_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, wide, [size], torch.zeros_like(scale), scale, gain, None, [for_x, for_weight, False]
        )
        if for_x:
            grad_x = grad_x.add_((grad @ gain)[..., None].div_(size).mul_(scale)).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype) if for_weight else None, None


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
