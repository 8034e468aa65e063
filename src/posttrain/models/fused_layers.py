"""Faster layers of transformers' models with explicit backward passes, for the CPU: norms, gated MLPs, position embeddings.

The work between matrix products is bound by memory: every small operation reads and writes a whole tensor. The functions here
read and write once, by compiled kernels where there are some. Layers are known by their parts, and a class of layers is changed
only where a trial gives the numbers of its own forward pass; only that pass is changed: parameters, names and hooks stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation

from posttrain.libraries.cpu_kernels.load import kernels_for
from posttrain.libraries.cpu_kernels.update import DTYPES, NormForm
from posttrain.models.fused_functions import gated, rms_norm, rotated

SILU = (nn.SiLU, SiLUActivation)
GELU_TANH = (GELUTanh, NewGELUActivation)  # the same function
# Modules of a gated MLP: the products with its input, the activation, the product with its output.
GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
ACTIVATIONS = ("act_fn", "activation_fn", "act")
DOWN = "down_proj"
ROTARY = "apply_rotary_pos_emb"  # the function of a model's file, with queries, keys, cosines and sines
# Allowed difference of a layer's output from its own forward pass: where it is rounded differs.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-10}
TRIED_ROWS = 4


def fuse_layers(model: nn.Module) -> int:
    """Replace the forward passes of the layers of ``model`` that are known and agree, in place. Returns: their number."""
    found: dict[Any, Callable[..., Any] | None] = {}
    fused = 0
    for module in model.modules():
        weights = str([(weight.shape, weight.dtype) for weight in module.parameters(recurse=False)])
        kind = type(module), weights, getattr(getattr(module, DOWN, None), "in_features", None), _eps(module)
        if kind not in found:
            found[kind] = _forward_of(module)
        forward = found[kind]
        if forward is not None:
            module.forward = MethodType(forward, module)
            fused += 1
    return fused


@torch.no_grad()
def _forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a faster forward pass of a module's class; None where there is none."""
    weight = next(module.parameters(), None)
    if weight is None or weight.dtype not in TOLERANCE or weight.device.type != "cpu":
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _norm(module) or _mlp(module) or _attention(module)


def _norm(module: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """RMS norms: the form whose numbers are the module's."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if eps is None or not isinstance(weight, Tensor) or weight.dim() != 1 or not _takes_rows(module):
        return None
    x = 3 * torch.randn(2 * TRIED_ROWS, len(weight), dtype=weight.dtype) + 1
    # With a weight of ones, 1 + the weight would equal twice the weight.
    weight = torch.randn(len(weight), dtype=weight.dtype)
    expected = functional_call(module, {"weight": weight}, (x,))
    if not isinstance(expected, Tensor) or expected.dtype != x.dtype:
        return None
    apart = {form: _apart(rms_norm(x, weight, eps, form), expected) for form in NormForm}
    form = min(NormForm, key=lambda form: apart[form])
    if not apart[form] <= TOLERANCE[x.dtype]:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # the result would have the wider dtype
            unfused: Tensor = type(self).forward(self, x)
            return unfused
        return rms_norm(x, self.weight, eps, form)

    return forward


def _eps(module: Any) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _mlp(module: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """MLPs with a gate: down(activation(gate(x)) * up(x))."""
    parts = {name: part for name, part in module.named_children() if not isinstance(part, nn.Dropout)}
    activation = next((name for name in ACTIVATIONS if name in parts), None)
    names = next((names for names in GATED if parts.keys() == {*names, DOWN, activation}), None)
    if activation is None or names is None or not _takes_rows(module):
        return None
    if not isinstance(parts[activation], SILU + GELU_TANH) or not isinstance(parts[names[0]], nn.Linear):
        return None
    gelu = isinstance(parts[activation], GELU_TANH)
    first: nn.Linear = parts[names[0]]

    def forward(self: Any, x: Tensor) -> Tensor:
        products = [getattr(self, name)(x) for name in names]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        down: Tensor = getattr(self, DOWN)(gated(gate, up, gelu=gelu))
        return down

    if first.weight.dtype not in DTYPES:
        return None
    x = torch.randn(TRIED_ROWS, first.in_features, dtype=first.weight.dtype)
    return forward if _apart(forward(module, x), module(x)) <= TOLERANCE[x.dtype] else None


def _attention(module: Any) -> Callable[..., Any] | None:
    """Attentions whose file has a function for position embeddings: the same forward pass with a faster one."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(ROTARY)
    dtype = next(module.parameters()).dtype
    if own is None or not _turns_halves(own, dtype):
        return None

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if more or named or kernels_for(q, k, cos, sin) is None or not (_fits(q, cos) and _fits(k, cos)):
            plain: tuple[Tensor, Tensor] = own(q, k, cos, sin, *more, **named)
            return plain
        return rotated(q, cos, sin), rotated(k, cos, sin)

    names = {**forward.__globals__, ROTARY: turned}
    again = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    again.__kwdefaults__ = forward.__kwdefaults__
    return again


def _turns_halves(function: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Try a model's function for position embeddings: others turn neighbours, or a part of a head."""
    q, k = torch.randn(1, 3, 5, 8, dtype=dtype), torch.randn(1, 1, 5, 8, dtype=dtype)
    cos, sin = torch.randn(2, 1, 5, 8, dtype=dtype)
    if kernels_for(q, cos) is None:
        return False
    try:
        expected = function(q, k, cos, sin)
    except (TypeError, RuntimeError):  # it has other arguments
        return False
    return all(_apart(rotated(x, cos, sin), own) <= TOLERANCE[dtype] for x, own in zip((q, k), expected, strict=True))


def _fits(x: Tensor, cos: Tensor) -> bool:
    """x [1, heads, tokens, dim] and cosines [1, tokens, dim]."""
    return x.dim() == 4 and len(x) == 1 and cos.shape == (1, x.shape[2], x.shape[3]) and x.shape[3] % 2 == 0


def _takes_rows(module: nn.Module) -> bool:
    """Return True for modules that are given one tensor."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # and self


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
