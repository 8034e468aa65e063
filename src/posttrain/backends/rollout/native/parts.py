"""Parts of a decoder layer of transformers, read as functions of rows with their current weights.

The tables say which modules are known by their names, and what is done with them; how a model puts them together is compared
with the model itself before any of it is used (trial.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from posttrain.backends.rollout.native.experts import activation_of, are_experts, downs, gate_ups, mixture
from posttrain.backends.rollout.native.kernel_parts import KernelParts, Rows
from posttrain.backends.rollout.native.kernels import PassKernels
from posttrain.backends.rollout.native.latents import LatentAttention, is_latent_attention, read_latent_attention
from posttrain.backends.rollout.native.named_parts import ATTENTIONS, attention_of
from posttrain.backends.rollout.native.neighbours import Neighbours, rotates_neighbours
from posttrain.backends.rollout.native.packed_products import Product, Stack
from posttrain.backends.rollout.native.products import FEWEST_ROWS, copies_weights, stacked_product
from posttrain.backends.rollout.native.state_kernels import StateKernels
from posttrain.backends.rollout.native.state_layers import StateLayer, inputs_of, state_layer, weights_of
from posttrain.models.fused_layers import ACTIVATIONS, GATED
from posttrain.models.recurrent import state_module


@dataclass(frozen=True, slots=True)
class Order:
    """The norms of a layer, by their modules' names, "" where there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""
    # Both attention and MLP are added to what the layer is given. The MLP reads the rows of the attention where it has no norm.
    parallel: bool = False


ORDERS = (
    Order(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    Order("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    Order("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    Order(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    Order(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    Order(before_attention="ln_1", before_mlp="ln_2"),
    Order(before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm"),
    Order(before_attention="operator_norm", before_mlp="ffn_norm"),
    Order(before_attention="input_layernorm", parallel=True),
)
# Modules of an attention: queries, keys and values, in one or three products; the output; norms of queries and keys.
INPUTS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("c_attn",))
GROUPED = "query_key_value"  # whose outputs are, for each key head, its queries, the key and the value
OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj")
NORMS_LAST = ("query_layernorm", "key_layernorm")  # behind the position embedding
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), NORMS_LAST)
# Modules of an MLP: the products with its input, the activation, the product with its output.
UNGATED = (("up_proj",), ("fc1",), ("c_fc",), ("dense_h_to_4h",))
DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")
WITHOUT_MODULE = {"w1", "w3", "w2"}  # gate, up and down with a silu that is no module
RESIDUALS = ("residual_multiplier", "residual_scale")
MLPS = ("mlp", "feed_forward", "block_sparse_moe")
ROUTERS = ("gate", "router")
# Of experts for all rows: times a gate's sigmoid, or as they are
SHARED: tuple[set[str], ...] = ({"shared_expert", "shared_expert_gate"}, {"shared_experts"}, {"shared_mlp"}, set())


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
    norms_last: bool  # behind the position embedding
    clip: float | None  # largest size of queries, keys and values
    output: Product


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The functions of one layer, with its current weights."""

    order: Order
    norms: dict[str, Rows]  # by module name
    mixer: Attention | LatentAttention | StateLayer
    mlp: Rows
    residual: float  # factor of what is added to the layer's input, twice


def unknown_part(layer: nn.Module, head_dim: int) -> str:
    """Return the reason why a layer cannot be read; "" when it can."""
    attention, mlp = attention_of(layer), mlp_of(layer)
    mixes = state_module(layer) is not None or _is_attention(attention, head_dim)
    mixes = mixes or (attention is not None and is_latent_attention(_parts(attention)))
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
    norms = {name for name in _parts(layer) - {*ATTENTIONS, *MLPS} if getattr(layer, name) is not mixer}
    found = next((order for order in ORDERS if norms == _names(order)), None)
    if found is None or not getattr(layer, "use_parallel_residual", False):
        return found
    return replace(found, parallel=True)


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
    return routed and are_experts(module.experts) and (shared is None or _is_mlp(shared))


def _shared(mlp: Any) -> nn.Module | None:
    """Return the expert that every row goes to; None where there is none."""
    names = ("shared_expert", "shared_experts", "shared_mlp")
    return next((getattr(mlp, name) for name in names if hasattr(mlp, name)), None)


def router_of(mlp: nn.Module | None) -> nn.Module | None:
    """Return the router of a mixture of experts; None for other MLPs."""
    if mlp is None or not hasattr(mlp, "experts"):
        return None
    return next((part for name, part in mlp.named_children() if name in ROUTERS), None)


def _router(mlp: Any) -> Any:
    """Return the function that chooses experts for rows, [N, hidden]."""
    router: Any = router_of(mlp)
    bias = getattr(mlp, "e_score_correction_bias", None)
    return router if bias is None else lambda rows: router(rows, bias)


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
        latents_turn_neighbours: bool = False,
    ):
        self.parts, self.head_dim, self.clip, self.neighbours = KernelParts(kernels), head_dim, clip, neighbours
        self.state_kernels, self.latents_turn_neighbours = state_kernels, latents_turn_neighbours
        self.stack, self.fewest_rows = stack, fewest_rows

    def layer(self, module: Any) -> Layer:
        """Read a layer whose parts are known."""
        order, state = _order(module), state_module(module)
        assert order is not None
        return Layer(
            order=order,
            norms={name: self.parts.norm(getattr(module, name)) for name in _names(order)},
            mixer=self.attention(attention_of(module))
            if state is None
            else state_layer(state, self.state_kernels, self.stack),
            mlp=self.mlp(mlp_of(module)),
            residual=float(next((getattr(module, name) for name in RESIDUALS if hasattr(module, name)), 1.0)),
        )

    def attention(self, attention: Any) -> Attention | LatentAttention:
        """Read an attention whose parts are known."""
        parts = _parts(attention)
        if is_latent_attention(parts):
            pairs = self.latents_turn_neighbours
            return read_latent_attention(attention, self.parts, self.stack, neighbours=pairs)
        inputs = next(names for names in INPUTS if parts.issuperset(names))
        norms = next((names for names in HEAD_NORMS if parts.issuperset(names)), None)
        found = (
            None
            if norms is None
            else (self.parts.norm(getattr(attention, norms[0])), self.parts.norm(getattr(attention, norms[1])))
        )
        output = next(getattr(attention, name) for name in OUTPUTS if name in parts)
        width = inputs_of(output)
        return Attention(
            query_key_value=self._grouped(attention.query_key_value, width)
            if GROUPED in inputs
            else self._inputs(*(getattr(attention, name) for name in inputs), width=width),
            head_norms=found,
            whole_norms=norms is not None and len(getattr(attention, norms[0]).weight) != self.head_dim,
            norms_last=norms == NORMS_LAST,
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

    def _grouped(self, layer: nn.Module, width: int) -> Product:
        """Return the product with an attention's input, of whose outputs all queries come first, then all keys, and so on.
        Args: width of all queries together."""
        (weight,), (bias,) = weights_of(layer)
        kv_heads = (len(weight) - width) // (2 * self.head_dim)

        def ordered(rows: Tensor) -> Tensor:
            heads = rows.detach().unflatten(0, (kv_heads, -1, self.head_dim))
            return torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])

        return self.stack([ordered(weight)], [None if bias is None else ordered(bias)])

    def mlp(self, module: Any) -> Rows:
        """Read an MLP or a mixture of experts."""
        parts = _parts(module)
        if "experts" in parts:
            experts, shared = module.experts, _shared(module)
            apart = copies_weights([experts.down_proj])
            return mixture(
                router=_router(module),
                gate_up=[self.stack([weight], [bias]) for weight, bias in gate_ups(experts, apart=apart)],
                activation=activation_of(experts, self.parts, apart=apart),
                down=[self.stack([weight], [bias]) for weight, bias in downs(experts)],
                fewest_rows=self.fewest_rows,
                shared=None if shared is None else self.mlp(shared),
                shared_gate=getattr(module, "shared_expert_gate", None),
            )
        last: Any = next(getattr(module, name) for name in (*DOWN, "w2") if name in parts)
        down, width = self.product(last), inputs_of(last)
        if parts == WITHOUT_MODULE:
            return Mlp(self.product(module.w1, module.w3), self.parts.gated(nn.SiLU(), width), down)
        activation = next(getattr(module, name) for name in ACTIVATIONS if name in parts)
        gated = next((names for names in GATED if parts.issuperset(names)), None)
        names = gated or next(names for names in UNGATED if parts.issuperset(names))
        first = self.product(*(getattr(module, name) for name in names))
        between = (self.parts.gated if gated else self.parts.ungated)(activation, width)
        return Mlp(first, between, down)

    def product(self, *modules: nn.Module) -> Product:
        """Return the product of rows with the weights of linear layers, side by side; an adapter is applied."""
        return self.stack(*weights_of(*modules))
