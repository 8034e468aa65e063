"""One token further for every row, with the layers of a Hugging Face model read as plain weights.

The pass that transformers' modules make is written for any use; for one token per sequence most of its time is not in the
products. This pass makes the same calculation with the model's own norms, activations and position embeddings, fewer and larger
products, and the cache's attention. Which models it holds for is not a list of names: it is tried against the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.products import Product, stacked_product
from posttrain.models.lora import effective_weight

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH_PARTS = LAYER_PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMED_ATTENTION_PARTS = ATTENTION_PARTS | {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


Turn = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What one layer computes, its weights as they are now."""

    module: Any
    query_key_value: Product
    output: Product
    gate_up: Product
    down: Product


def unknown_parts(model: PreTrainedModel) -> str:
    """Why the layers of ``model`` are not of the kind that this pass knows; "" when they are."""
    body: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not all(hasattr(body, name) for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
        return f"{type(body).__name__} is not made of embed_tokens, layers, norm and rotary_emb"
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for kind in set(_kinds(model)):
        turned = getattr(body.rotary_emb, "inv_freq" if kind is None else f"{kind}_inv_freq", ())
        if 2 * len(turned) != head_dim:
            return f"{type(body.rotary_emb).__name__} does not turn every number of a head"
    for layer in body.layers:
        for module, known in (
            (layer, (LAYER_PARTS, SANDWICH_PARTS)),
            (getattr(layer, "self_attn", None), (ATTENTION_PARTS, NORMED_ATTENTION_PARTS)),
            (getattr(layer, "mlp", None), (MLP_PARTS,)),
        ):
            parts = {name for name, _ in module.named_children()} if module is not None else set()
            if not any(parts == one for one in known):
                return f"{type(module).__name__} is made of {', '.join(sorted(parts)) or 'nothing'}"
    return ""


def _kinds(model: PreTrainedModel) -> list[str | None]:
    """For every layer, the name under which its position embeddings are asked for; None where all have the same."""
    body: Any = model.get_decoder()
    if hasattr(body.rotary_emb, "layer_types"):
        return list(model.config.get_text_config().layer_types)
    return [None] * len(body.layers)


def _not_read(hidden: Tensor) -> Tensor:
    raise AssertionError("read_weights comes first")


class Decoder:
    """The pass, for one model. An adapter on the model is applied."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.body: Any = model.get_decoder()
        config = model.config.get_text_config()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        # Scaling and window of each layer's attention: the modules hand them over in ways of their own, so they are told.
        self.attention_settings: list[tuple[float, int | None]] = []
        self.sandwich = any(hasattr(layer, "pre_feedforward_layernorm") for layer in self.body.layers)
        self.kinds = _kinds(model)
        self.layers: list[_Layer] = []
        self.head: Product = _not_read

    def read_weights(self) -> None:
        """Take the model's weights as they are now."""
        self.layers = []  # what was packed before goes first: there is never room for two
        self.layers = [self._read(layer) for layer in self.body.layers]
        self.head = self._product(self.model.get_output_embeddings())

    def drop_weights(self) -> None:
        """Give up the copies that were made of them."""
        self.layers = []
        self.head = _not_read

    def _read(self, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        return _Layer(
            module,
            query_key_value=self._product(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self._product(attention.o_proj),
            gate_up=self._product(mlp.gate_proj, mlp.up_proj),
            down=self._product(mlp.down_proj),
        )

    def _product(self, *modules: nn.Module) -> Product:
        biases: list[Tensor | None] = [cast(Any, getattr(module, "base_layer", module)).bias for module in modules]
        return stacked_product([effective_weight(module) for module in modules], biases)

    def step(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """The last hidden states, [rows, hidden], after the newest token of every row; its keys and values are stored.

        Args: token_ids, positions [rows] int64.
        """
        hidden = self.body.embed_tokens(token_ids)
        turns = self.rotation(hidden, positions)
        for number in range(len(self.layers)):
            hidden = self.layer_step(number, hidden, turns, cache)
        normed: Tensor = self.body.norm(hidden)
        return normed

    def rotation(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Turn]:
        """Cosines and signed sines of the position embedding, [rows, 1, head_dim] each, for every kind of layer.

        The second half of x, negated, then its first half, is what the embedding multiplies by the sines: that is x rolled by
        half, with the sign put into the sines.
        """
        found: dict[str | None, Turn] = {}
        for kind in set(self.kinds):
            kinds = () if kind is None else (kind,)
            cos, sin = self.body.rotary_emb(hidden[:, None], positions[:, None], *kinds)
            first, second = sin.chunk(2, dim=-1)
            found[kind] = (cos, torch.cat([-first, second], dim=-1))
        return found

    def layer_step(self, number: int, hidden: Tensor, turns: dict[str | None, Turn], cache: KeyValueCache) -> Tensor:
        """What layer ``number`` makes of its input, [rows, hidden]."""
        layer = self.layers[number]
        module = layer.module
        mixed = self._attend(number, layer, module.input_layernorm(hidden), turns[self.kinds[number]], cache)
        if self.sandwich:
            hidden = hidden + module.post_attention_layernorm(mixed)
            gate, up = layer.gate_up(module.pre_feedforward_layernorm(hidden)).chunk(2, dim=1)
            after: Tensor = hidden + module.post_feedforward_layernorm(layer.down(module.mlp.act_fn(gate).mul_(up)))
            return after
        hidden = mixed.add_(hidden)
        gate, up = layer.gate_up(module.post_attention_layernorm(hidden)).chunk(2, dim=1)
        return layer.down(module.mlp.act_fn(gate).mul_(up)).add_(hidden)

    def _attend(self, number: int, layer: _Layer, normed: Tensor, turn: Turn, cache: KeyValueCache) -> Tensor:
        attention = layer.module.self_attn
        turned = self.heads + self.kv_heads
        projected = layer.query_key_value(normed).view(len(normed), turned + self.kv_heads, self.head_dim)
        query_key, value = projected[:, :turned], projected[:, turned:]
        if hasattr(attention, "q_norm"):
            query, key = query_key.split([self.heads, self.kv_heads], dim=1)
            query_key = torch.cat([attention.q_norm(query), attention.k_norm(key)], dim=1)
        cos, sin = turn
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.head_dim // 2, dims=-1), sin)
        query, key = query_key.split([self.heads, self.kv_heads], dim=1)
        cache.write(number, key, value)
        mixed = cache.attend(number, query, *self.attention_settings[number])
        return layer.output(mixed.reshape(len(mixed), -1))
