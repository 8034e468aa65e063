"""Fast passes over packed prompts and over one token per row, with the layers of a Hugging Face model read as plain weights.

The modules of transformers are written for any use; they spend much of a prefill, and most of a pass over one token per
sequence, outside the products. These passes make the same calculation with fewer and larger products, compiled kernels in
between, and for parts without kernels the model's own modules and operations of torch. Support is not a list of model names:
it is tested against the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kept_products import KeptProducts
from posttrain.backends.rollout.native.kernel_parts import Rows
from posttrain.backends.rollout.native.kernels import Kernels, PassKernels, Turn
from posttrain.backends.rollout.native.latents import LatentAttention, keeps_neighbours, turns_neighbours
from posttrain.backends.rollout.native.named_parts import PLACES, attention_of, last_norm_of, layers_of, rotary_of
from posttrain.backends.rollout.native.neighbours import Neighbours, angles_once, rotates_neighbours
from posttrain.backends.rollout.native.packed_products import Product
from posttrain.backends.rollout.native.parts import Attention, Layer, Reader, mlp_of, router_of, unknown_part
from posttrain.backends.rollout.native.products import FEWEST_ROWS, stacked_product
from posttrain.backends.rollout.native.state_kernels import Parts, StateKernels, load_state_kernels
from posttrain.backends.rollout.native.state_layers import Seen, has_state_kernels
from posttrain.models.attention import CachedRows
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.latent_attention import has_latents
from posttrain.models.packed_attention import Packed, attend_packed
from posttrain.models.recurrent import state_module

# Tokens that go through a layer at a time: what is between its products then stays in a processor's cache
PREFILL_ROWS = 512
UNTURNED = "unturned"  # kind of the layers without position embeddings
STATE = "state"  # of those that keep a state

# From a layer's number, its queries and keys, values and turn, as PassKernels.attend takes them: its attention.
Attend = Callable[[int, Tensor, Tensor, Turn], Tensor]


class Past(NamedTuple):
    """The past that the tokens of a pass see."""

    attend: Attend
    states: Seen  # for layers that keep a state


def unknown_parts(model: PreTrainedModel) -> str:
    """Return the reason why this pass does not support the layers of ``model``; "" when it does."""
    body: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    places = hasattr(body, "rotary_emb") or hasattr(body, PLACES)
    if not layers_of(body) or last_norm_of(body) is None or not places:
        return (
            f"{type(body).__name__} does not consist of tokens' embeddings, layers, a norm and rotary_emb or {PLACES}"
        )
    reasons = (unknown_part(layer, head_dim_of(model)) for layer in layers_of(body))
    if reason := next((reason for reason in reasons if reason), ""):
        return reason
    attention = attention_of(layers_of(body)[0])
    pictures = model.config.get_text_config() is not model.config
    if pictures and (rotates_neighbours(attention) or keeps_neighbours(model)):
        # Prompts with pictures go through the model's own modules, whose keys would be in another order.
        return f"{type(attention).__name__} rotates neighbouring numbers, and the model takes pictures"
    return ""


def head_dim_of(model: PreTrainedModel) -> int:
    """Return the width of an attention head."""
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kinds(model: PreTrainedModel) -> list[str | None]:
    """Return, for every layer, the key of its position embeddings; None where all layers share them."""
    body: Any = model.get_decoder()
    kinds: list[str | None] = [None] * len(layers_of(body))
    if hasattr(rotary_of(body), "layer_types"):
        kinds = list(model.config.get_text_config().layer_types)
    for number, layer in enumerate(layers_of(body)):
        if state_module(layer) is not None:
            kinds[number] = STATE
        elif rotary_of(body) is None or not getattr(attention_of(layer), "use_rope", True):
            kinds[number] = UNTURNED
    return kinds


def _not_read(hidden: Tensor) -> Tensor:
    raise AssertionError("read_weights must be called first")


class Decoder:
    """The fast decoding pass of one model. An adapter on the model is applied."""

    def __init__(self, model: PreTrainedModel, kernels: PassKernels | None = None):
        self.model = model
        self.kernels = kernels
        self.unused_kernels = ""  # why it goes without those that there are
        self.products = KeptProducts(stacked_product)  # with the weights
        self.fewest_rows = FEWEST_ROWS  # of such a product
        self.body: Any = model.get_decoder()
        config = model.config.get_text_config()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = head_dim_of(model)
        self.clip: float | None = getattr(config, "clip_qkv", None)
        self.embedding_scale: float = getattr(config, "embedding_multiplier", 1.0)
        # By layer: modules pass them in different ways, so the trial records them.
        self.attention_settings: dict[int, AttentionSettings] = {}
        self.kinds = _kinds(model)
        self.latent = has_latents(config)
        self.latents_turn_neighbours = False
        if self.latent:
            self.kv_heads, self.head_dim = 1, config.kv_lora_rank + config.qk_rope_head_dim
            self.latents_turn_neighbours = turns_neighbours(model)
        self.neighbours = None if self.latent else Neighbours.of(model)
        self.once = angles_once(model)
        self.state_kernels, self.unused_state_kernels = self._load_state_kernels()
        self.layers: list[Layer] = []
        self.norm: Rows = _not_read
        self.head: Product = _not_read

    def read_weights(self) -> None:
        """Read the model's current weights; copies of those that have not changed are kept."""
        self.drop_weights()  # copies are then replaced one by one: there is no room for two
        self.products.begin()
        reader = Reader(
            self.kernels,
            self.head_dim,
            self.clip,
            self.products,
            self.fewest_rows,
            self.state_kernels,
            self.neighbours,
            self.latents_turn_neighbours,
        )
        self.layers = [reader.layer(layer) for layer in layers_of(self.body)]
        for number, settings in self.attention_settings.items():
            if settings.sinks is not None:
                sinks = attention_of(layers_of(self.body)[number]).sinks.detach().float()
                self.attention_settings[number] = settings._replace(sinks=sinks)
        self.norm = reader.parts.norm(last_norm_of(self.body))
        self.head = reader.product(self.model.get_output_embeddings())

    def drop_weights(self) -> None:
        """Forget the weights, so that no pass can use them before they are read, and compared with their copies, again."""
        self.layers = []
        self.norm = self.head = _not_read

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return what the first layer is given, [rows, hidden]."""
        hidden: Tensor = self.body.get_input_embeddings()(token_ids)
        if hasattr(self.body, PLACES):
            hidden = hidden + getattr(self.body, PLACES)(positions)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def step(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the last hidden states, [rows, hidden], after the newest token of every row; store its keys and values.

        Args: token_ids, positions [rows] int64.
        """
        hidden = self.embed(token_ids, positions)
        turns = self.rotation(hidden, positions)
        past = self.over_cache(cache)
        for number in range(len(self.layers)):
            hidden = self.layer_step(number, hidden, turns, past)
        return self.norm(hidden)

    def prefill(
        self, token_ids: Tensor, positions: Tensor, layout: Packed, cache: KeyValueCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states of packed prompts, announced to the cache, and store their keys and values.

        Args: token_ids, positions [N] int64; layout: that of the row; wanted [n] int64: tokens whose states are returned, None:
            all. Returns: [n or N, hidden].
        """
        hidden = self.embed(token_ids, positions)
        turns = self.rotation(hidden, positions)
        pieces = self._pieces(len(token_ids), cache.split)
        pasts = [self.over_prompts(cache, layout, *piece) for piece in pieces]
        of_pieces = [{kind: Turn(cos[a:b], sin[a:b], n) for kind, (cos, sin, n) in turns.items()} for a, b in pieces]
        for number in range(len(self.layers)):
            for (begin, end), past, turn in zip(pieces, pasts, of_pieces, strict=True):
                hidden[begin:end] = self.layer_step(number, hidden[begin:end], turn, past)
        return self.norm(hidden if wanted is None else hidden[wanted])

    def _pieces(self, tokens: int, split: int) -> list[tuple[int, int]]:
        """Cut a row into pieces of about equal size, (begin, end) each, none of which has tokens before and after ``split``;
        attention and states by operations of torch take the whole row."""
        if not self._prompt_kernels or not self.compiled_states:
            return [(0, tokens)]
        bounds = [0]
        for stretch in (split, tokens - split):
            count, begin = -(-stretch // PREFILL_ROWS), bounds[-1]
            bounds += [begin + stretch * number // count for number in range(1, count + 1)]
        return list(pairwise(bounds))

    def rotation(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Turn]:
        """Return the position embedding of every kind of layer.

        The embedding multiplies the sines by the second half of x, negated, followed by its first half: that is x rolled by
        half, with the sign included in the sines. Some models leave the end of a head as it is.
        """
        found: dict[str | None, Turn] = {}
        for kind in set(self.kinds) - {STATE}:
            shape = len(hidden), 1, self.head_dim
            cos, sin = torch.ones(shape, device=hidden.device), torch.zeros(shape, device=hidden.device)
            rotated = 0
            if kind != UNTURNED:
                kinds = () if kind is None else (kind,)
                angles = self.body.rotary_emb(hidden[:, None], positions[:, None], *kinds)
                pairs = isinstance(angles, Tensor)  # complex numbers
                its_cos, its_sin = (angles.real, angles.imag) if pairs else angles
                if self.once or pairs:
                    its_cos, its_sin = (torch.cat([each, each], dim=-1) for each in (its_cos, its_sin))
                rotated = its_cos.shape[-1]
                if self.neighbours is not None:
                    its_cos, its_sin = (self.neighbours.by_halves(each) for each in (its_cos, its_sin))
                cos[..., :rotated] = its_cos
                first, second = its_sin.chunk(2, dim=-1)
                sin[..., :rotated] = torch.cat([-first, second], dim=-1)
            found[kind] = Turn(cos, sin, rotated)
        return found

    def layer_step(self, number: int, hidden: Tensor, turns: dict[str | None, Turn], past: Past) -> Tensor:
        """Return the output of layer ``number``, [rows, hidden]."""
        layer, mixer = self.layers[number], self.layers[number].mixer
        order, norms = layer.order, layer.norms

        def normed(name: str, rows: Tensor) -> Tensor:
            return norms[name](rows) if name else rows

        def added(change: Tensor, rows: Tensor) -> Tensor:
            return (change if layer.residual == 1.0 else change.mul_(layer.residual)).add_(rows)

        before = normed(order.before_attention, hidden)
        if isinstance(mixer, Attention):
            mixed = self._mix(number, mixer, before, turns[self.kinds[number]], past.attend)
        elif isinstance(mixer, LatentAttention):
            turn, settings = turns[self.kinds[number]], self.attention_settings[number]
            mixed = mixer(number, before, turn, past.attend, past.states, settings)
        else:
            mixed = mixer(before, past.states)
        if order.parallel:
            if order.before_mlp:
                before = normed(order.before_mlp, hidden)
            return added(mixed.add_(layer.mlp(before)), hidden)
        hidden = added(normed(order.after_attention, mixed), hidden)
        return added(normed(order.after_mlp, layer.mlp(normed(order.before_mlp, hidden))), hidden)

    def _mix(self, number: int, layer: Attention, rows: Tensor, turn: Turn, attend: Attend) -> Tensor:
        turned = self.heads + self.kv_heads
        projected = layer.query_key_value(rows).view(len(rows), -1, self.head_dim)
        query_key, value = projected[:, :turned], projected[:, turned : turned + self.kv_heads]
        gate = projected[:, turned + self.kv_heads :]
        if layer.norms_last:
            query_key, turn = turn.of(query_key), turn.without()
        if layer.head_norms is not None:
            parts = query_key.split([self.heads, self.kv_heads], dim=1)
            if layer.whole_norms:
                parts = tuple(part.flatten(1) for part in parts)
            normed = [norm(part) for norm, part in zip(layer.head_norms, parts, strict=True)]
            query_key = torch.cat([part.view(len(rows), -1, self.head_dim) for part in normed], dim=1)
        if layer.clip is not None:
            query_key, value = (part.clamp(-layer.clip, layer.clip) for part in (query_key, value))
        attended = attend(number, query_key, value, turn)
        if gate.shape[1]:
            attended *= torch.sigmoid(gate).flatten(1)
        return layer.output(attended)

    @property
    def has_experts(self) -> bool:
        """True where a layer is a mixture of experts."""
        return any(router_of(mlp_of(layer)) is not None for layer in layers_of(self.body))

    def _load_state_kernels(self) -> tuple[StateKernels | None, str]:
        """Return the kernels for layers that keep a state, where there are some for all of them, and else why not."""
        modules = [module for layer in layers_of(self.body) if (module := state_module(layer)) is not None]
        if not modules:
            return None, ""
        if not isinstance(self.kernels, Kernels):
            return None, "there are none for layers that keep a state"
        found = load_state_kernels(self.kernels.dtype)
        if isinstance(found, str):
            return None, found
        unknown = next((module for module in modules if not has_state_kernels(module, found)), None)
        return (found, "") if unknown is None else (None, f"there are none for {type(unknown).__name__}")

    @property
    def compiled_states(self) -> bool:
        """True where no layer keeps a state but through kernels."""
        return self.state_kernels is not None or STATE not in self.kinds

    @property
    def compiled_attention(self) -> bool:
        """True where attention goes through kernels."""
        return not self.unused_attention

    @property
    def unused_attention(self) -> str:
        """Return the reason why attention goes without kernels; "" where it goes through them."""
        if self.kernels is None:
            return "there are none"
        if self.head_dim < self.kernels.narrowest:
            return f"heads of {self.head_dim} numbers are narrower than their {self.kernels.narrowest}"
        if self.latent and not isinstance(self.kernels, Kernels):
            return "there are none for latent vectors on this device"
        return ""

    def new_cache(self, most_slots: int | None = None) -> KeyValueCache:
        """Create a cache for these passes."""
        tile_step = self.kernels.tile_step if self.kernels is not None and self.compiled_attention else None
        kernels = self._prompt_kernels
        rounding = kernels.rounding if kernels is not None and kernels.rounding.used else None
        return KeyValueCache.of(self.model, most_slots, tile_step, rounding)

    @property
    def _prompt_kernels(self) -> Kernels | None:
        """The kernels that attention over prompts goes through; None: operations of torch."""
        known = isinstance(self.kernels, Kernels) and self.compiled_attention and not self.latent
        return cast(Kernels, self.kernels) if known else None

    def over_cache(self, cache: KeyValueCache) -> Past:
        """Return the past of one new token per row, which is announced to the cache."""

        def compiled(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            assert self.kernels is not None
            return self.kernels.attend(cache, number, query_key, value, turn, self.attention_settings[number])

        def plain(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            query, key = turn.of(query_key).split([self.heads, self.kv_heads], dim=1)
            cache.write(number, key, value)
            return cache.attend(number, query, self.attention_settings[number]).flatten(1)

        rows = torch.arange(len(cache.places), device=cache.device)
        parts = Parts(rows, rows + 1, rows, cache.places, cache.prompt_slots)
        return Past(compiled if self.compiled_attention else plain, Seen(cache, CachedRows(cache), parts))

    def over_prompts(self, cache: KeyValueCache, layout: Packed, begin: int, end: int) -> Past:
        """Return the past of the tokens from ``begin`` to ``end`` of packed prompts, which are announced to the cache; it
        holds those before ``begin`` already."""
        cut = ((max(start, begin), min(stop, end), slot, known - start) for start, stop, slot, known in cache.parts)
        found = [(a - begin, b - begin, slot, a + shift) for a, b, slot, shift in cut if a < b]
        parts = torch.tensor(found, dtype=torch.int64).T.contiguous()
        kernels = self._prompt_kernels

        def compiled(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            assert kernels is not None
            if begin == cache.split:
                cache.make_copies(number)
            return kernels.prefill(cache, number, parts, query_key, value, turn, self.attention_settings[number])

        def plain(number: int, query_key: Tensor, value: Tensor, turn: Turn) -> Tensor:
            query, key = turn.of(query_key).split([self.heads, self.kv_heads], dim=1)
            keys, values = cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], number)
            asked = query.transpose(0, 1)[None]
            return attend_packed(asked, keys, values, layout, *self.attention_settings[number])[0].flatten(1)

        return Past(compiled if kernels else plain, Seen(cache, layout, Parts(*parts)))
