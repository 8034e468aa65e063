"""Latent attention (models.latent_attention) with its current weights: over packed prompts, and over a cache of latents.

New tokens read the cache as it is: a head's queries are multiplied by its part of ``kv_b_proj`` for keys, and what they read by
that for values. Of prompts, keys and values of all heads are computed, because many tokens read each. In queries and keys the
turned numbers come first, those of a pair half of them apart, as kernels turn them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.kernel_parts import KernelParts, Rows
from posttrain.backends.rollout.native.kernels import Turn
from posttrain.backends.rollout.native.named_parts import attention_of, layers_of
from posttrain.backends.rollout.native.neighbours import rotates_neighbours
from posttrain.backends.rollout.native.packed_products import Product, Stack
from posttrain.backends.rollout.native.state_layers import Seen, weights_of
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.latent_attention import has_latents
from posttrain.models.lora import effective_weight
from posttrain.models.packed_attention import attend_packed

LATENTS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
QUERIES = ({"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"})


class Attend(Protocol):
    """Attention of one token per row over its past; decoder.Attend."""

    def __call__(self, number: int, query_key: Tensor, value: Tensor, turn: Turn, /) -> Tensor: ...


class Sizes(NamedTuple):
    """Numbers of a head and of a latent vector."""

    heads: int
    turned: int  # of a query and a key, by their position
    plain: int  # of a query and a key, beside them
    rank: int  # of a latent vector
    values: int


def keeps_neighbours(model: PreTrainedModel) -> bool:
    """Return True for a model that multiplies pairs of neighbouring numbers by complex ones, and leaves them neighbours."""
    body: Any = model.get_decoder()
    hidden, places = (torch.zeros(1, 1, *more, device=model.device, dtype=model.dtype) for more in ((1,), ()))
    return has_latents(model.config.get_text_config()) and isinstance(body.rotary_emb(hidden, places), Tensor)


def turns_neighbours(model: PreTrainedModel) -> bool:
    """Return True for latent attention that turns neighbouring numbers."""
    body: Any = model.get_decoder()
    attention = attention_of(layers_of(body)[0])
    hidden, places = (torch.zeros(1, 1, *more, device=model.device, dtype=model.dtype) for more in ((1,), ()))
    if isinstance(
        body.rotary_emb(hidden, places), Tensor
    ):  # complex numbers, which are multiplied by pairs of neighbours
        return True
    if hasattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb_interleave"):
        return bool(getattr(model.config.get_text_config(), "rope_interleave", True))
    return rotates_neighbours(attention)


def is_latent_attention(parts: set[str]) -> bool:
    """Return True for an attention with these parts."""
    return any(parts == LATENTS | queries for queries in QUERIES)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """The functions of a latent attention, with its current weights."""

    sizes: Sizes
    given: Product  # of its input: queries, or their latent vectors; latent vectors; keys that are turned
    query_norm: Rows | None
    query: Product | None  # of their latent vectors
    norm: Rows
    both: Tensor  # [heads * (plain + values), rank], of latents: keys and values of each head
    output: Product

    def __call__(
        self, number: int, rows: Tensor, turn: Turn, attend: Attend, seen: Seen, settings: AttentionSettings
    ) -> Tensor:
        """Return the output of layer ``number``, [N, hidden], and store the latents of its rows."""
        sizes = self.sizes
        given = self.given(rows)
        first = given.shape[1] - sizes.rank - sizes.turned
        queries, latent, key = given.split([first, sizes.rank, sizes.turned], dim=1)
        if self.query is not None and self.query_norm is not None:
            queries = self.query(self.query_norm(queries))
        queries, latent = queries.unflatten(1, (sizes.heads, -1)), self.norm(latent)
        if seen.cache.decodes:
            return self.output(self._over_latents(number, queries, latent, key, turn, attend))
        turn = Turn(turn.cos[..., : sizes.turned], turn.sin[..., : sizes.turned], sizes.turned)
        asked = torch.cat([turn.of(queries[..., : sizes.turned]), queries[..., sizes.turned :]], dim=2)
        turned = turn.of(key[:, None])
        latents, keys = seen.cache.update(latent[None, None], turned.transpose(0, 1)[None], number)
        both = linear(latents[0, 0], self.both).unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        plain, values = both.split([sizes.plain, sizes.values], dim=2)
        wide = torch.cat([keys[0].expand(sizes.heads, -1, -1), plain], dim=2)
        padded = pad(values, (0, wide.shape[2] - sizes.values))
        found = attend_packed(asked.transpose(0, 1)[None], wide[None], padded[None], seen.layout, *settings)
        return self.output(found[0, ..., : sizes.values].flatten(1))

    def _over_latents(
        self, number: int, queries: Tensor, latent: Tensor, key: Tensor, turn: Turn, attend: Attend
    ) -> Tensor:
        """Return what one token per row reads, [rows, heads * values]."""
        sizes = self.sizes
        of_keys, of_values = self.both.view(sizes.heads, -1, sizes.rank).split([sizes.plain, sizes.values], dim=1)
        query_key = latent.new_empty(len(latent), sizes.heads + 1, sizes.turned + sizes.rank)
        query_key[:, :-1, : sizes.turned] = queries[..., : sizes.turned]
        query_key[:, :-1, sizes.turned :] = torch.bmm(queries[..., sizes.turned :].transpose(0, 1), of_keys).transpose(
            0, 1
        )
        query_key[:, -1, : sizes.turned], query_key[:, -1, sizes.turned :] = key, latent
        read = attend(number, query_key, pad(latent, (sizes.turned, 0))[:, None], turn)
        read = read.unflatten(1, (sizes.heads, -1))[..., sizes.turned :]
        return torch.bmm(read.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1).flatten(1)


def read_latent_attention(module: Any, parts: KernelParts, stack: Stack, *, neighbours: bool) -> LatentAttention:
    """Read a latent attention. Args: stack: makes the products; neighbours: pairs that are turned lie side by side."""
    sizes = Sizes(
        heads=module.num_heads,
        turned=module.qk_rope_head_dim,
        plain=module.qk_nope_head_dim,
        rank=module.kv_lora_rank,
        values=module.v_head_dim,
    )
    by_halves = torch.arange(sizes.turned)
    if neighbours:
        by_halves = by_halves.view(-1, 2).T.flatten()
    in_head = torch.cat([sizes.plain + by_halves, torch.arange(sizes.plain)])
    of_heads = (torch.arange(sizes.heads)[:, None] * len(in_head) + in_head).flatten()
    of_latents = torch.cat([torch.arange(sizes.rank), sizes.rank + by_halves])
    latents = _reordered(module.kv_a_proj_with_mqa, of_latents)
    if getattr(module, "q_a_proj", None) is None:
        first, query, query_norm = _reordered(module.q_proj, of_heads), None, None
    else:
        (weight,), (bias,) = weights_of(module.q_a_proj)
        first = weight, bias
        query_norm = parts.norm(module.q_a_layernorm)
        of_query = _reordered(module.q_b_proj, of_heads)
        query = stack([of_query[0]], [of_query[1]])
    return LatentAttention(
        sizes=sizes,
        given=stack([first[0], latents[0]], [first[1], latents[1]]),
        query_norm=query_norm,
        query=query,
        norm=parts.norm(module.kv_a_layernorm),
        both=effective_weight(module.kv_b_proj).detach(),
        output=stack(*weights_of(module.o_proj)),
    )


def _reordered(layer: nn.Module, order: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a linear layer with its outputs in another order; an adapter is applied."""
    (weight,), (bias,) = weights_of(layer)
    order = order.to(weight.device)
    return weight.detach()[order], None if bias is None else bias.detach()[order]
