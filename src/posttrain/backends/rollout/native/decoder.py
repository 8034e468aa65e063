"""Fast passes over packed prompts and over one token per row, with the layers of a Hugging Face model read as plain weights.

The modules of transformers are written for any use; they spend much of a prefill, and most of a pass over one token per
sequence, outside the products. These passes make the same calculation with fewer and larger products, compiled kernels in
between, and for parts without kernels the model's own modules and operations of torch. Support is not a list of model names:
it is tested against the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from posttrain.models.packed_attention import Packed, attend_packed

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH_PARTS = LAYER_PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMED_ATTENTION_PARTS = ATTENTION_PARTS | {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}

SILU = (nn.SiLU, SiLUActivation)
PREFILL_ROWS = (
    512  # tokens that go through a layer at a time: what is between its products then stays in a processor's cache
)

Turn = tuple[Tensor, Tensor]
Rows = Callable[[Tensor], Tensor]  # a function from rows to rows
# From a layer's number, its queries and keys, values and turn, as Kernels.attend takes them: its attention.
Attend = Callable[[int, Tensor, Tensor, Turn], Tensor]


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
        attend = self.over_cache(cache)
        for number in range(len(self.layers)):
            hidden = self.layer_step(number, hidden, turns, attend)
        return self.norm(hidden)

    def prefill(
        self, token_ids: Tensor, positions: Tensor, layout: Packed, cache: KeyValueCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states of packed prompts, announced to the cache, and store their keys and values.

        Args: token_ids, positions [N] int64; layout: that of the row; wanted [n] int64: tokens whose states are returned, None:
            all. Returns: [n or N, hidden].
        """
        hidden = self.body.embed_tokens(token_ids)
        turns = self.rotation(hidden, positions)
        pieces = self._pieces(len(token_ids))
        attends = [self.over_prompts(cache, layout, *piece) for piece in pieces]
        of_pieces = [{kind: (cos[a:b], sin[a:b]) for kind, (cos, sin) in turns.items()} for a, b in pieces]
        for number in range(len(self.layers)):
            for (begin, end), attend, turn in zip(pieces, attends, of_pieces, strict=True):
                hidden[begin:end] = self.layer_step(number, hidden[begin:end], turn, attend)
        return self.norm(hidden if wanted is None else hidden[wanted])

    def _pieces(self, tokens: int) -> list[tuple[int, int]]:
        """Cut a row into pieces of about equal size, (begin, end) each; attention by operations of torch takes the whole row."""
        count = -(-tokens // PREFILL_ROWS) if self._compiled_attention else 1
        bounds = [tokens * number // count for number in range(count + 1)]
        return list(pairwise(bounds))

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

    def layer_step(self, number: int, hidden: Tensor, turns: dict[str | None, Turn], attend: Attend) -> Tensor:
        """Return the output of layer ``number``, [rows, hidden]."""
        layer = self.layers[number]
        mixed = self._mix(number, layer, layer.norms["input_layernorm"](hidden), turns[self.kinds[number]], attend)
        if self.sandwich:
            hidden = layer.norms["post_attention_layernorm"](mixed).add_(hidden)
            changed = self._mlp(layer, layer.norms["pre_feedforward_layernorm"](hidden))
            return layer.norms["post_feedforward_layernorm"](changed).add_(hidden)
        hidden = mixed.add_(hidden)
        return self._mlp(layer, layer.norms["post_attention_layernorm"](hidden)).add_(hidden)

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        return layer.down(layer.activation(layer.gate_up(normed)))

    def _mix(self, number: int, layer: _Layer, normed: Tensor, turn: Turn, attend: Attend) -> Tensor:
        turned = self.heads + self.kv_heads
        projected = layer.query_key_value(normed).view(len(normed), turned + self.kv_heads, self.head_dim)
        query_key, value = projected[:, :turned], projected[:, turned:]
        if "q_norm" in layer.norms:
            query, key = query_key.split([self.heads, self.kv_heads], dim=1)
            query_key = torch.cat([layer.norms["q_norm"](query), layer.norms["k_norm"](key)], dim=1)
        return layer.output(attend(number, query_key, value, turn))

    @property
    def _compiled_attention(self) -> bool:
        return self.kernels is not None and self.head_dim % LANES == 0

    def over_cache(self, cache: KeyValueCache) -> Attend:
        """Return the attention of one new token per row, which is announced to the cache."""

        def compiled(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            assert self.kernels is not None
            return self.kernels.attend(cache, number, query_key, value, turn, *self.attention_settings[number])

        def plain(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            query, key = self._turned(query_key, turn)
            cache.write(number, key, value)
            return cache.attend(number, query, *self.attention_settings[number]).flatten(1)

        return compiled if self._compiled_attention else plain

    def over_prompts(self, cache: KeyValueCache, layout: Packed, begin: int, end: int) -> Attend:
        """Return the attention of the tokens from ``begin`` to ``end`` of packed prompts, which are announced to the cache; it
        holds those before ``begin`` already."""
        cut = ((max(start, begin), min(stop, end), slot, known - start) for start, stop, slot, known in cache.parts)
        found = [(a - begin, b - begin, slot, a + shift) for a, b, slot, shift in cut if a < b]
        parts = torch.tensor(found, dtype=torch.int64).T.contiguous()

        def compiled(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            assert self.kernels is not None
            return self.kernels.prefill(cache, number, parts, query_key, value, turn, *self.attention_settings[number])

        def plain(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            query, key = self._turned(query_key, turn)
            keys, values = cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], number)
            asked = query.transpose(0, 1)[None]
            return attend_packed(asked, keys, values, layout, *self.attention_settings[number])[0].flatten(1)

        return compiled if self._compiled_attention else plain

    def _turned(self, query_key: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions."""
        cos, sin = turn
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.head_dim // 2, dims=-1), sin)
        query, key = query_key.split([self.heads, self.kv_heads], dim=1)
        return query, key
