"""Compiled attention of packed rows, forward and backward (attention.cpp): no score matrix is kept, and nothing is padded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.cpu_kernels.update import DTYPES

SOURCE = Path(__file__).with_name("attention.cpp")
LANES = 16  # numbers that a head's width is a multiple of
WIDEST = 1024  # numbers of a head (rounded.h)
MOST_SHARED = 96  # query heads for one key head
# Distances to float64 that are allowed: of torch's own, besides this share of the exact result, for other orders of sums.
TIMES, SHARE = 1.1, 2e-6
RESULTS = ("gradient of queries", "gradient of keys", "gradient of values", "gradient of sinks")

_NUMBER, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Packed(ctypes.Structure):
    """Arguments of both passes, as in attention.cpp."""

    _fields_ = [
        *((name, _NUMBER) for name in ("count", "heads", "kv_heads", "dim", "window")),
        *((f"{states}_{part}", _NUMBER) for states in ("query", "key", "value") for part in ("row", "head")),
        *((name, _POINTER) for name in ("spans", "query", "key", "value", "sinks")),
        *((name, _FLOAT) for name in ("scaling", "softcap")),
        *((name, _POINTER) for name in ("output", "lse", "grad", "grad_query", "grad_key", "grad_value", "totals")),
    ]


class Settings(NamedTuple):
    """Settings of a layer and its row."""

    # [S, 4] int64: first token, tokens, first token of the prompt that they follow, its tokens (0: none). Those that
    # share a prompt are neighbours.
    spans: Tensor
    scaling: float
    window: int | None  # a query sees at most this many of the latest keys, itself included
    softcap: float  # scores x become c tanh(x / c); 0 for none


class AttentionKernels:
    """Attention of CPU tensors of one dtype; sums are taken in float32.

    Args of both: query [n, heads, dim]; key, value [n or more, kv_heads, dim], each contiguous in a head; sinks [heads]
    float32 or None: a score of each head that takes a share of the weights and adds nothing.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self.dtype = dtype
        self._forward = getattr(library, f"attention_forward_{DTYPES[dtype]}")
        self._backward = getattr(library, f"attention_backward_{DTYPES[dtype]}")
        for function in (self._forward, self._backward):
            function.argtypes, function.restype = (ctypes.POINTER(_Packed), ctypes.c_int), None

    def takes(self, query: Tensor, key: Tensor) -> bool:
        """Return True for heads of these numbers and widths."""
        dim, shared = query.shape[-1], query.shape[1] // key.shape[1]
        return dim % LANES == 0 and dim <= WIDEST and shared <= MOST_SHARED

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        """Return softmax(scaling q k') v [n, heads, dim], and the log of the sums of e^score [n, heads] float32."""
        output, lse = query.new_empty(query.shape), torch.empty(query.shape[:2])
        packed = _packed(query, key, value, sinks, settings)
        packed.output, packed.lse = output.data_ptr(), lse.data_ptr()
        self._forward(packed, torch.get_num_threads())
        return output, lse

    def backward(
        self,
        grad: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of query, key, value and sinks, for that of the output, [n, heads, dim] contiguous. With
        U = e^(sink - lse), and S the sum of weights times their gradients, that of a sink is the sum of -U S."""
        packed = _packed(query, key, value, sinks, settings)
        grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        totals = torch.empty(query.shape[:2])
        packed.grad, packed.lse, packed.totals = grad.data_ptr(), lse.data_ptr(), totals.data_ptr()
        packed.grad_query, packed.grad_key, packed.grad_value = (each.data_ptr() for each in grads)
        self._backward(packed, torch.get_num_threads())
        return *grads, None if sinks is None else ((sinks - lse).exp_() * totals).sum(dim=0).neg_()


def _packed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: Settings) -> _Packed:
    strides = [stride for states in (query, key, value) for stride in states.stride()[:2]]
    states = [each.data_ptr() for each in (settings.spans, query, key, value)]
    sizes = (len(settings.spans), query.shape[1], key.shape[1], query.shape[2], settings.window or 0)
    of_sinks = None if sinks is None else sinks.data_ptr()
    return _Packed(*sizes, *strides, *states, of_sinks, settings.scaling, settings.softcap)


@cache
def load_attention(dtype: torch.dtype) -> AttentionKernels | str:
    """Load the kernels for tensors of ``dtype``, compiling them if necessary, and compare them with torch's products.
    Returns: them, or why not."""
    library = compiled_library(SOURCE)
    if isinstance(library, str):
        return library
    kernels = AttentionKernels(library, dtype)
    return difference(kernels) or kernels


@torch.inference_mode(False)  # the sampler may be the first to use them: it scores prompts in that mode
def difference(kernels: AttentionKernels) -> str:
    """Return which result is farther from float64 than that of torch's products, in a row of a prompt, two responses to it and a
    sequence; "" when none is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        spans = torch.tensor([(0, 21, 0, 0), (21, 5, 0, 21), (26, 18, 0, 21), (44, 9, 0, 0)])
        query, grad = torch.randn(2, 53, 4, 32).to(kernels.dtype)
        key, value = torch.randn(2, 53, 2, 32).to(kernels.dtype)
        sinks = torch.randn(4)
    visible = torch.zeros(53, 53, dtype=torch.bool)
    for start, tokens, prompt_start, prompt in spans.tolist():
        own = slice(start, start + tokens)
        visible[own, own] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        visible[own, prompt_start : prompt_start + prompt] = True
    latest = visible & (visible.long().flip(1).cumsum(1).flip(1) <= 7)
    for window, softcap, of_sinks, seen in ((None, 0.0, None, visible), (7, 2.0, sinks, latest)):
        given = query, key, value, of_sinks
        settings = Settings(spans, 0.3, window, softcap)
        output, lse = kernels.forward(*given, settings)
        found = output, *kernels.backward(grad, lse, *given, settings)
        exact = _by_products(torch.float64, *given, grad, seen, softcap)
        plain = _by_products(kernels.dtype, *given, grad, seen, softcap)
        for name, ours, theirs, true in zip(("output", *RESULTS), found, plain, exact, strict=False):
            assert ours is not None
            allowed = TIMES * (theirs.double() - true).norm() + SHARE * true.norm()
            if not (ours.double() - true).norm() <= allowed:
                return f"the compiled attention gives another {name} than torch"
    return ""


def _by_products(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    grad: Tensor,
    visible: Tensor,
    softcap: float,
) -> list[Tensor]:
    """Return the output and the gradients by torch's operations in ``dtype``, scores in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [each.to(dtype).requires_grad_() for each in (query.detach().clone(), key.clone(), value.clone())]
    shared = query.shape[1] // key.shape[1]
    with torch.enable_grad():
        q = inputs[0].transpose(0, 1)
        k, v = (each.transpose(0, 1).repeat_interleave(shared, dim=0) for each in inputs[1:])
        scores = (q @ k.transpose(1, 2)).to(wide) * 0.3
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            inputs.append(sinks.to(wide).requires_grad_())
            scores = torch.cat([scores, inputs[3].view(-1, 1, 1).expand(-1, len(query), 1)], dim=2)
        weights = scores.softmax(dim=-1)[..., : len(key)]
        output = (weights.to(dtype) @ v).transpose(0, 1)
        return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(dtype))]
