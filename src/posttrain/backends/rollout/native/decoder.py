"""Fast decoding pass: one token per row, with the layers of a Hugging Face model read as plain weights.

The modules of transformers are written for any use; with one token per sequence they spend most of their time outside the
products. This pass makes the same calculation with fewer and larger products, compiled kernels in between, and for parts
without kernels the model's own modules and operations of torch. Support is not a list of model names: it is tested against
the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kernels import LANES, Kernels
from posttrain.backends.rollout.native.products import Product, stacked_product
from posttrain.models.fused_layers import GEMMA_NORMS, LLAMA_NORMS
from posttrain.models.lora import effective_weight

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH_PARTS = LAYER_PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMED_ATTENTION_PARTS = ATTENTION_PARTS | {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}

SILU = (nn.SiLU, SiLUActivation)

Turn = tuple[Tensor, Tensor]
Rows = Callable[[Tensor], Tensor]  # a function from rows to rows


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The functions of one layer, with its current weights."""

    norms: dict[str, Rows]  # by module name
    query_key_value: Product
    output: Product
    gate_up: Product
    activation: Rows  # of gate and up, concatenated
    down: Product


def unknown_parts(model: PreTrainedModel) -> str:
    """Return the reason why this pass does not support the layers of ``model``; "" when it does."""
    body: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not all(hasattr(body, name) for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
        return f"{type(body).__name__} does not consist of embed_tokens, layers, norm and rotary_emb"
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for kind in set(_kinds(model)):
        turned = getattr(body.rotary_emb, "inv_freq" if kind is None else f"{kind}_inv_freq", ())
        if 2 * len(turned) != head_dim:
            return f"{type(body.rotary_emb).__name__} does not rotate every number of a head"
    for layer in body.layers:
        for module, known in (
            (layer, (LAYER_PARTS, SANDWICH_PARTS)),
            (getattr(layer, "self_attn", None), (ATTENTION_PARTS, NORMED_ATTENTION_PARTS)),
            (getattr(layer, "mlp", None), (MLP_PARTS,)),
        ):
            parts = {name for name, _ in module.named_children()} if module is not None else set()
            if not any(parts == one for one in known):
                return f"{type(module).__name__} consists of {', '.join(sorted(parts)) or 'nothing'}"
    return ""


def _kinds(model: PreTrainedModel) -> list[str | None]:
    """Return, for every layer, the key of its position embeddings; None where all layers share them."""
    body: Any = model.get_decoder()
    if hasattr(body.rotary_emb, "layer_types"):
        return list(model.config.get_text_config().layer_types)
    return [None] * len(body.layers)


def _not_read(hidden: Tensor) -> Tensor:
    raise AssertionError("read_weights must be called first")


class Decoder:
    """The fast decoding pass of one model. An adapter on the model is applied."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels | None = None):
        self.model = model
        self.kernels = kernels
        self.body: Any = model.get_decoder()
        config = model.config.get_text_config()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        # Scaling and window of each layer's attention: modules pass them in different ways, so the trial records them.
        self.attention_settings: list[tuple[float, int | None]] = []
        self.sandwich = any(hasattr(layer, "pre_feedforward_layernorm") for layer in self.body.layers)
        self.kinds = _kinds(model)
        self.layers: list[_Layer] = []
        self.norm: Rows = _not_read
        self.head: Product = _not_read

    def read_weights(self) -> None:
        """Read the model's current weights."""
        self.layers = []  # frees the previous copies first: there is no room for two
        self.layers = [self._read(layer) for layer in self.body.layers]
        self.norm = self._norm(self.body.norm)
        self.head = self._product(self.model.get_output_embeddings())

    def drop_weights(self) -> None:
        """Free the packed copies of the weights."""
        self.layers = []
        self.norm = self.head = _not_read

    def _read(self, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        found = [*module.named_children(), *attention.named_children()]
        return _Layer(
            norms={name: self._norm(one) for name, one in found if name.endswith("norm")},
            query_key_value=self._product(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self._product(attention.o_proj),
            gate_up=self._product(mlp.gate_proj, mlp.up_proj),
            activation=self._activation(mlp),
            down=self._product(mlp.down_proj),
        )

    def _product(self, *modules: nn.Module) -> Product:
        biases: list[Tensor | None] = [cast(Any, getattr(module, "base_layer", module)).bias for module in modules]
        return stacked_product([effective_weight(module) for module in modules], biases)

    def _norm(self, module: Any) -> Rows:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if self.kernels is None or kind not in LLAMA_NORMS | GEMMA_NORMS:
            return cast(Rows, module)
        weight, one_more = module.weight.detach(), kind in GEMMA_NORMS
        if weight.dtype != self.kernels.dtype or len(weight) % LANES:
            return cast(Rows, module)
        eps = module.eps if one_more else module.variance_epsilon
        return partial(self.kernels.norm, weight=weight, eps=eps, one_more=one_more)

    def _activation(self, mlp: Any) -> Rows:
        if self.kernels is not None and isinstance(mlp.act_fn, SILU) and mlp.gate_proj.out_features % LANES == 0:
            return self.kernels.swiglu

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            activated: Tensor = mlp.act_fn(gate)
            return activated.mul_(up)

        return gated

    def step(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the last hidden states, [rows, hidden], after the newest token of every row; store its keys and values.

        Args: token_ids, positions [rows] int64.
        """
        hidden = self.body.embed_tokens(token_ids)
        turns = self.rotation(hidden, positions)
        for number in range(len(self.layers)):
            hidden = self.layer_step(number, hidden, turns, cache)
        return self.norm(hidden)

    def rotation(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Turn]:
        """Return cosines and signed sines of the position embedding, [rows, 1, head_dim] each, for every kind of layer.

        The embedding multiplies the sines by the second half of x, negated, followed by its first half: that is x rolled by
        half, with the sign included in the sines.
        """
        found: dict[str | None, Turn] = {}
        for kind in set(self.kinds):
            kinds = () if kind is None else (kind,)
            cos, sin = self.body.rotary_emb(hidden[:, None], positions[:, None], *kinds)
            first, second = sin.chunk(2, dim=-1)
            found[kind] = (cos.contiguous(), torch.cat([-first, second], dim=-1))
        return found

    def layer_step(self, number: int, hidden: Tensor, turns: dict[str | None, Turn], cache: KeyValueCache) -> Tensor:
        """Return the output of layer ``number``, [rows, hidden]."""
        layer = self.layers[number]
        mixed = self._attend(number, layer, layer.norms["input_layernorm"](hidden), turns[self.kinds[number]], cache)
        if self.sandwich:
            hidden = layer.norms["post_attention_layernorm"](mixed).add_(hidden)
            changed = self._mlp(layer, layer.norms["pre_feedforward_layernorm"](hidden))
            return layer.norms["post_feedforward_layernorm"](changed).add_(hidden)
        hidden = mixed.add_(hidden)
        return self._mlp(layer, layer.norms["post_attention_layernorm"](hidden)).add_(hidden)

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        return layer.down(layer.activation(layer.gate_up(normed)))

    def _attend(self, number: int, layer: _Layer, normed: Tensor, turn: Turn, cache: KeyValueCache) -> Tensor:
        turned = self.heads + self.kv_heads
        projected = layer.query_key_value(normed).view(len(normed), turned + self.kv_heads, self.head_dim)
        query_key, value = projected[:, :turned], projected[:, turned:]
        if "q_norm" in layer.norms:
            query, key = query_key.split([self.heads, self.kv_heads], dim=1)
            query_key = torch.cat([layer.norms["q_norm"](query), layer.norms["k_norm"](key)], dim=1)
        settings = self.attention_settings[number]
        if self.kernels is not None and self.head_dim % LANES == 0:
            return layer.output(self.kernels.attend(cache, number, query_key, value, turn, *settings))
        cos, sin = turn
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.head_dim // 2, dims=-1), sin)
        query, key = query_key.split([self.heads, self.kv_heads], dim=1)
        cache.write(number, key, value)
        return layer.output(cache.attend(number, query, *settings).flatten(1))
