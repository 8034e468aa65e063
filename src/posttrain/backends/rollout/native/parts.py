"""Parts of a decoder layer of transformers, read as functions of rows with their current weights.

The tables say which modules are known by their names, and what is done with them; how a model puts them together is compared
with the model itself before any of it is used (trial.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from posttrain.backends.rollout.native.experts import mixture
from posttrain.backends.rollout.native.kernels import PassKernels
from posttrain.backends.rollout.native.neighbours import Neighbours, rotates_neighbours
from posttrain.backends.rollout.native.packed_products import Product, Stack
from posttrain.backends.rollout.native.products import FEWEST_ROWS, stacked_product
from posttrain.backends.rollout.native.state_kernels import StateKernels
from posttrain.backends.rollout.native.state_layers import StateLayer, state_layer, weights_of
from posttrain.libraries.cpu_kernels.update import NormForm
from posttrain.models.fused_layers import ACTIVATIONS, GATED, GELU_TANH, SILU
from posttrain.models.recurrent import state_module

Rows = Callable[[Tensor], Tensor]  # a function from rows to rows


@dataclass(frozen=True, slots=True)
class Order:
    """The norms of a layer, by their modules' names, "" where there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""
    parallel: bool = False  # attention and MLP read the same normed rows, and both are added to what the layer is given


ORDERS = (
    Order(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    Order("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    Order("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    Order(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    Order(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    Order(before_attention="operator_norm", before_mlp="ffn_norm"),
    Order(before_attention="input_layernorm", parallel=True),
)
# Modules of an attention: queries, keys and values, in one or three products; the output; norms of queries and keys.
INPUTS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
OUTPUTS = ("o_proj", "dense", "out_proj")
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
# Modules of an MLP: the products with its input, the activation, the product with its output.
UNGATED = (("up_proj",), ("fc1",), ("c_fc",))
DOWN = ("down_proj", "fc2", "c_proj")
WITHOUT_MODULE = {"w1", "w3", "w2"}  # gate, up and down with a silu that is no module
MLPS = ("mlp", "feed_forward")
ROUTERS = ("gate", "router")
# Of experts for all rows: times a gate's sigmoid, or as they are
SHARED: tuple[set[str], ...] = ({"shared_expert", "shared_expert_gate"}, {"shared_experts"}, set())


@dataclass(frozen=True, slots=True, eq=False)
class KernelNorm:
    """An RMS norm by a kernel."""

    kernels: PassKernels
    weight: Tensor
    eps: float
    form: NormForm

    def __call__(self, rows: Tensor) -> Tensor:
        return self.kernels.norm(rows, self.weight, self.eps, self.form)


@dataclass(frozen=True, slots=True, eq=False)
class KernelGated:
    """The activation of the first half of a row, times the second half, by a kernel."""

    kernels: PassKernels
    gelu: bool

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.kernels.gated(gate_up, gelu=self.gelu)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Two products and what is between them."""

    first: Product
    between: Rows
    down: Product

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self.between(self.first(rows)))


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The functions of an attention, with its current weights."""

    query_key_value: Product  # and behind them a gate, for each number of the attention's result, where there is one
    head_norms: tuple[Rows, Rows] | None  # of queries and keys
    whole_norms: bool  # over all heads together, not each alone
    clip: float | None  # largest size of queries, keys and values
    output: Product


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The functions of one layer, with its current weights."""

    order: Order
    norms: dict[str, Rows]  # by module name
    mixer: Attention | StateLayer
    mlp: Rows
    residual: float  # factor of what is added to the layer's input, twice


def unknown_part(layer: nn.Module, head_dim: int) -> str:
    """Return the reason why a layer cannot be read; "" when it can."""
    attention, mlp = getattr(layer, "self_attn", None), mlp_of(layer)
    mixes = state_module(layer) is not None or _is_attention(attention, head_dim)
    for module, known in ((layer, _order(layer)), (attention, mixes), (mlp, _is_mlp(mlp))):
        if not known:
            parts = sorted(_parts(module)) if module is not None else []
            return f"{type(module).__name__} consists of {', '.join(parts) or 'nothing'}"
    if attention is not None and rotates_neighbours(attention) and _has_head_norms(attention):
        return f"{type(attention).__name__} rotates neighbouring numbers of a head behind its norms"
    return ""


def mlp_of(layer: nn.Module) -> nn.Module | None:
    """Return the MLP of a layer; None where it has none of a known name."""
    return next((part for name, part in layer.named_children() if name in MLPS), None)


def _parts(module: Any) -> set[str]:
    """Return the names of a module's parts; dropout does nothing while sampling."""
    return {name for name, part in module.named_children() if not isinstance(part, nn.Dropout)}


def _order(layer: nn.Module) -> Order | None:
    mixer = state_module(layer)
    norms = {name for name in _parts(layer) - {"self_attn", *MLPS} if getattr(layer, name) is not mixer}
    return next((order for order in ORDERS if norms == _names(order)), None)


def _names(order: Order) -> set[str]:
    return {order.before_attention, order.after_attention, order.before_mlp, order.after_mlp} - {""}


def _is_attention(module: Any, head_dim: int) -> bool:
    if module is None:
        return False
    parts = _parts(module)
    if not any({*inputs, output} | norms == parts for inputs in INPUTS for output in OUTPUTS for norms in _norm_sets()):
        return False
    norms = [getattr(getattr(module, name), "weight", None) for names in HEAD_NORMS for name in names if name in parts]
    return all(isinstance(weight, Tensor) and weight.dim() == 1 and len(weight) % head_dim == 0 for weight in norms)


def _has_head_norms(attention: Any) -> bool:
    return any(_parts(attention).issuperset(names) for names in HEAD_NORMS)


def _norm_sets() -> tuple[set[str], ...]:
    return (set(), *(set(names) for names in HEAD_NORMS))


def _is_mlp(module: Any) -> bool:
    if module is None:
        return False
    parts = _parts(module)
    if parts == WITHOUT_MODULE or any(
        {*first, activation, down} == parts for first in GATED + UNGATED for activation in ACTIVATIONS for down in DOWN
    ):
        return True
    routed = any(parts == {"experts", router} | shared for router in ROUTERS for shared in SHARED)
    shared = _shared(module)
    return routed and _are_experts(module.experts) and (shared is None or _is_mlp(shared))


def _shared(mlp: Any) -> nn.Module | None:
    """Return the expert that every row goes to; None where there is none."""
    return getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))


def router_of(mlp: nn.Module | None) -> nn.Module | None:
    """Return the router of a mixture of experts; None for other MLPs."""
    if mlp is None or not hasattr(mlp, "experts"):
        return None
    return next((part for name, part in mlp.named_children() if name in ROUTERS), None)


def _are_experts(module: Any) -> bool:
    """Stacked weights without biases: gate and up [experts, 2 * width, hidden], down [experts, hidden, width]."""
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"} or not hasattr(
        module, "act_fn"
    ):
        return False
    experts, hidden, width = module.down_proj.shape
    return tuple(module.gate_up_proj.shape) == (experts, 2 * width, hidden)


class Reader:
    """Reads layers, with kernels where there are some for a part."""

    def __init__(
        self,
        kernels: PassKernels | None,
        head_dim: int,
        clip: float | None,
        stack: Stack = stacked_product,
        fewest_rows: int = FEWEST_ROWS,
        state_kernels: StateKernels | None = None,
        neighbours: Neighbours | None = None,
    ):
        self.kernels, self.head_dim, self.clip, self.neighbours = kernels, head_dim, clip, neighbours
        self.state_kernels = state_kernels
        self.stack, self.fewest_rows = stack, fewest_rows
        self._norm_forms: dict[type, NormForm | None] = {}

    def layer(self, module: Any) -> Layer:
        """Read a layer whose parts are known."""
        order, state = _order(module), state_module(module)
        assert order is not None
        return Layer(
            order=order,
            norms={name: self.norm(getattr(module, name)) for name in _names(order)},
            mixer=self.attention(module.self_attn)
            if state is None
            else state_layer(state, self.state_kernels, self.stack),
            mlp=self.mlp(mlp_of(module)),
            residual=float(getattr(module, "residual_multiplier", 1.0)),
        )

    def attention(self, attention: Any) -> Attention:
        """Read an attention whose parts are known."""
        parts = _parts(attention)
        inputs = next(names for names in INPUTS if parts.issuperset(names))
        norms = next((names for names in HEAD_NORMS if parts.issuperset(names)), None)
        found = (
            None
            if norms is None
            else (self.norm(getattr(attention, norms[0])), self.norm(getattr(attention, norms[1])))
        )
        output = next(getattr(attention, name) for name in OUTPUTS if name in parts)
        return Attention(
            query_key_value=self._inputs(*(getattr(attention, name) for name in inputs), width=output.in_features),
            head_norms=found,
            whole_norms=norms is not None and len(getattr(attention, norms[0]).weight) != self.head_dim,
            clip=self.clip,
            output=self.product(output),
        )

    def _inputs(self, first: Any, *others: Any, width: int) -> Product:
        """Return the product with an attention's input. Twice as many queries as its output is wide are each head's query
        and a gate, side by side: the gates are put behind all others."""
        if self.neighbours is not None:
            weight, bias = self.neighbours.reordered(*weights_of(first, *others), width, self.head_dim)
            return self.stack([weight], [bias])
        if not others or first.out_features != 2 * width:
            return self.product(first, *others)
        weights, biases = weights_of(first, *others)

        def half(rows: Tensor | None, number: int) -> Tensor | None:
            return None if rows is None else rows.unflatten(0, (-1, 2, self.head_dim))[:, number].flatten(0, 1)

        halves = [(half(weights[0], number), half(biases[0], number)) for number in (0, 1)]
        ordered = [halves[0], *zip(weights[1:], biases[1:], strict=True), halves[1]]
        return self.stack([cast(Tensor, weight) for weight, _ in ordered], [bias for _, bias in ordered])

    def norm(self, module: Any) -> Rows:
        """Read a norm: RMS norms by a kernel, in the form that agrees with the module; other modules as they are."""
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if (
            self.kernels is None
            or eps is None
            or not isinstance(weight, Tensor)
            or weight.dim() != 1
            or weight.dtype != self.kernels.dtype
            or len(weight) < self.kernels.narrowest
        ):
            return cast(Rows, module)
        if type(module) not in self._norm_forms:
            self._norm_forms[type(module)] = self._norm_form(module, weight.detach(), eps)
        form = self._norm_forms[type(module)]
        if form is None:
            return cast(Rows, module)
        return KernelNorm(self.kernels, weight.detach(), eps, form)

    def _norm_form(self, module: Any, weight: Tensor, eps: float) -> NormForm | None:
        """Return the form of an RMS norm in which the kernel's numbers are the module's, but for its rounding; None for
        other norms."""
        assert self.kernels is not None
        x = 3 * torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight) + 1
        own, kernel = module(x).detach().float(), self.kernels.norm
        apart = {form: float((kernel(x, weight, eps, form).float() - own).norm()) for form in NormForm}
        form = min(NormForm, key=lambda form: apart[form])
        return form if apart[form] <= 1e-2 * float(own.norm()) else None

    def mlp(self, module: Any) -> Rows:
        """Read an MLP or a mixture of experts."""
        parts = _parts(module)
        if "experts" in parts:
            experts = module.experts
            shared = _shared(module)
            return mixture(
                router=cast(nn.Module, router_of(module)),
                gate_up=[self.stack([weight], [None]) for weight in experts.gate_up_proj.detach()],
                activation=self._gated(experts.act_fn, experts.down_proj.shape[2]),
                down=[self.stack([weight], [None]) for weight in experts.down_proj.detach()],
                fewest_rows=self.fewest_rows,
                shared=None if shared is None else self.mlp(shared),
                shared_gate=getattr(module, "shared_expert_gate", None),
            )
        last: Any = next(getattr(module, name) for name in (*DOWN, "w2") if name in parts)
        down = self.product(last)
        if parts == WITHOUT_MODULE:
            return Mlp(self.product(module.w1, module.w3), self._gated(nn.SiLU(), last.in_features), down)
        activation = next(getattr(module, name) for name in ACTIVATIONS if name in parts)
        gated = next((names for names in GATED if parts.issuperset(names)), None)
        names = gated or next(names for names in UNGATED if parts.issuperset(names))
        first = self.product(*(getattr(module, name) for name in names))
        between = self._gated(activation, last.in_features) if gated else _ungated(activation)
        return Mlp(first, between, down)

    def product(self, *modules: nn.Module) -> Product:
        """Return the product of rows with the weights of linear layers, side by side; an adapter is applied."""
        return self.stack(*weights_of(*modules))

    def _gated(self, activation: nn.Module, width: int) -> Rows:
        """Return the activation of the first half of a row, times the second half."""
        known = isinstance(activation, SILU + GELU_TANH)
        if self.kernels is not None and known and width >= self.kernels.narrowest:
            return KernelGated(self.kernels, isinstance(activation, GELU_TANH))

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            activated: Tensor = activation(gate)
            return activated.mul_(up)

        return gated


def _ungated(activation: nn.Module) -> Rows:
    # NewGELUActivation computes the same by six operations of torch
    return partial(gelu, approximate="tanh") if isinstance(activation, GELU_TANH) else cast(Rows, activation)
