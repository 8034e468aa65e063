"""Layers that keep a state, read from transformers' modules with their current weights: linear attention, short convolutions.

The tables say which modules are known by the names of their parts. They are computed by kernels (states.cpp) between two
products; others, and all where there are no kernels, by the modules themselves. States lie in a cache as the modules have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.packed_products import Product, Stack
from posttrain.backends.rollout.native.state_kernels import Convolution, DeltaRule, Parts, StateKernels
from posttrain.models.lora import effective_weight

SILU = ("silu", "swish")


class Seen(NamedTuple):
    """The past that the tokens of a pass see."""

    cache: KeyValueCache
    layout: Any  # of the model's modules
    parts: Parts  # the tokens' sequences


StateLayer = Callable[[Tensor, Seen], Tensor]  # rows, [N, hidden] each


class _Form(NamedTuple):
    """Names of the parts of a gated delta rule."""

    inputs: tuple[str, ...]  # queries, keys, values, gates, shares, steps
    norm: str
    output: str


DELTA_RULES = (
    _Form(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "norm", "out_proj"),
    _Form(("in_proj_qkvz", "in_proj_ba"), "norm", "out_proj"),
    _Form(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),
)
SHORT_CONVOLUTION = {"conv", "in_proj", "out_proj"}


def state_layer(module: Any, kernels: StateKernels | None, stack: Stack) -> StateLayer:
    """Read a layer that keeps a state. Args: stack: makes the products."""
    form, parts = _delta_rule(module), {name for name, _ in module.named_children()}
    if not has_state_kernels(module, kernels):
        return _Module(module)
    assert kernels is not None
    if form is None:
        convolution = _convolution(module.conv)
        given, taken = stack(*weights_of(module.in_proj)), stack(*weights_of(module.out_proj))
        return _ShortConvolution(kernels, module.layer_idx, convolution, given, taken)
    weights, biases = weights_of(*(getattr(module, name) for name in form.inputs))
    if "in_proj_qkvz" in parts:
        order = _order_of_groups(module).to(weights[0].device)
        weights, biases = [torch.cat(weights)[order]], [None]
    norm = getattr(module, form.norm)
    rule = DeltaRule(
        key_heads=module.num_k_heads,
        value_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        decay=module.A_log.detach().float().exp(),
        step_bias=module.dt_bias.detach().float(),
        norm=norm.weight.detach().float(),
        eps=norm.variance_epsilon,
        share=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        convolution=_convolution(module.conv1d),
    )
    return _DeltaRule(
        kernels, module.layer_idx, rule, stack(weights, biases), stack(*weights_of(getattr(module, form.output)))
    )


def has_state_kernels(module: Any, kernels: StateKernels | None) -> bool:
    """Return True for a layer that kernels compute."""
    form, parts = _delta_rule(module), {name for name, _ in module.named_children()}
    if kernels is None or (form is None and parts != SHORT_CONVOLUTION):
        return False
    convolution = module.conv if form is None else module.conv1d
    of_itself = type(convolution) is nn.Conv1d and convolution.groups == convolution.in_channels
    return of_itself and convolution.kernel_size[0] <= kernels.most_taps


def weights_of(*modules: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of linear layers; an adapter is applied."""
    layers: list[Any] = [getattr(module, "base_layer", module) for module in modules]
    weights = [effective_weight(module) for module in modules]
    turned = [weight.T if isinstance(layer, Conv1D) else weight for weight, layer in zip(weights, layers, strict=True)]
    return turned, [layer.bias for layer in layers]


def inputs_of(module: nn.Module) -> int:
    """Return the width of a linear layer's input."""
    layer: Any = getattr(module, "base_layer", module)
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)


def _delta_rule(module: Any) -> _Form | None:
    parts = {name for name, _ in module.named_children()}
    if getattr(module, "activation", None) not in SILU:
        return None
    found = (form for form in DELTA_RULES if parts == {*form.inputs, form.norm, form.output, "conv1d"})
    form = next(found, None)
    return form if form and hasattr(getattr(module, form.norm), "variance_epsilon") else None


def _convolution(module: nn.Conv1d) -> Convolution:
    weight, bias = module.weight.detach()[:, 0].T.float(), module.bias
    return Convolution(weight.contiguous(), None if bias is None else bias.detach().float())


def _order_of_groups(module: Any) -> Tensor:
    """Return the order of Qwen3-Next's outputs in which all queries come first, then all keys, and so on: it has them side by
    side for each key head."""
    each = module.num_v_heads // module.num_k_heads
    order: list[Tensor] = []
    begin = 0
    for widths in ([module.head_k_dim] * 2 + [each * module.head_v_dim] * 2, [each] * 2):
        rows = torch.arange(module.num_k_heads * sum(widths)).view(module.num_k_heads, -1) + begin
        order += [part.flatten() for part in rows.split(widths, dim=1)]
        begin += rows.numel()
    return torch.cat(order)


@dataclass(frozen=True, slots=True, eq=False)
class _Module:
    """A layer by transformers' own operations."""

    module: Any

    def __call__(self, rows: Tensor, seen: Seen) -> Tensor:
        given = rows[:, None] if seen.cache.decodes else rows[None]
        output: Tensor = self.module(given, **{self.module.cache_name: seen.cache, "attention_layout": seen.layout})
        return output.flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _DeltaRule:
    kernels: StateKernels
    layer: int
    rule: DeltaRule
    given: Product
    taken: Product

    def __call__(self, rows: Tensor, seen: Seen) -> Tensor:
        rule = self.rule
        like = torch.empty(0, rule.value_heads, rule.key_dim, rule.value_dim)

        def states(owner: str, slots: int) -> tuple[Tensor, Tensor]:
            inputs = _inputs(seen.cache, owner, self.layer, slots, rule.convolution, self.kernels.dtype)
            return inputs, seen.cache.states.room(owner, self.layer, "recurrent", slots, like)

        if seen.cache.decodes:
            own, first = states("response", len(rows)), states("prompt", 0)
        else:
            own, first = states("prompt", int(seen.parts.slots.max()) + 1), None
        return self.taken(self.kernels.delta_rule(rule, seen.parts, self.given(rows), *own, first))


@dataclass(frozen=True, slots=True, eq=False)
class _ShortConvolution:
    kernels: StateKernels
    layer: int
    convolution: Convolution
    given: Product
    taken: Product

    def __call__(self, rows: Tensor, seen: Seen) -> Tensor:
        def inputs(owner: str, slots: int) -> Tensor:
            return _inputs(seen.cache, owner, self.layer, slots, self.convolution, self.kernels.dtype)

        if seen.cache.decodes:
            own, first = inputs("response", len(rows)), inputs("prompt", 0)
        else:
            own, first = inputs("prompt", int(seen.parts.slots.max()) + 1), None
        return self.taken(self.kernels.short_convolution(self.convolution, seen.parts, self.given(rows), own, first))


def _inputs(
    cache: KeyValueCache, owner: str, layer: int, slots: int, convolution: Convolution, dtype: torch.dtype
) -> Tensor:
    """Return the last inputs of a convolution, [slots, taps, channels]."""
    taps, channels = convolution.weights.shape
    like = torch.empty(0, channels, taps, dtype=dtype)
    return cache.states.room(owner, layer, "conv", slots, like).transpose(1, 2)
