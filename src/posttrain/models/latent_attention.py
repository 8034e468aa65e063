"""Multi-head latent attention over a cache of latent vectors (DeepSeek-V2, arXiv:2405.04434, section 2.1).

For every token one latent vector c of ``kv_lora_rank`` numbers is cached, with one rotated key k of ``qk_rope_head_dim`` numbers,
both for all heads. A head's keys are [U c, k] and its values are V c; U and V are parts of the layer's ``kv_b_proj``. Queries
[q, r] have the scores q U c + r k = (U' q) c + r k. So the cache is one head of keys [k, c] and values [0, c], no key or value
of an earlier token is computed again, and V is applied to what a query has read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


def has_latents(config: Any) -> bool:
    """Return True for the configuration of a model whose layers cache latent vectors."""
    return bool(getattr(config, "kv_lora_rank", None))


def stored(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of one head, [B, 1, N, rope + rank] each. Args: latent [B, 1, N, rank]; rotated [B, 1, N, rope]."""
    return torch.cat([rotated, latent], dim=3), pad(latent, (rotated.shape[3], 0))


def attend_latent(module: Any, query: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute attention of one new token per row over cached latents.

    Args: module: the layer's attention; query [rows, heads, nope + rope]; attend, from such queries over what is ``stored`` to
        what they read, [rows, heads, rope + rank].
    Returns: [rows, heads, v_head_dim].
    """
    rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
    weight = _weight(module.kv_b_proj, rank, query).view(query.shape[1], -1, rank)
    of_keys, of_values = weight[:, :nope], weight[:, nope:]
    over_latents = torch.einsum("rhn,hnc->rhc", query[..., :nope], of_keys)
    read = attend(torch.cat([query[..., nope:], over_latents], dim=2))[..., -rank:]
    return torch.einsum("rhc,hvc->rhv", read, of_values)


def _weight(layer: nn.Module, rank: int, like: Tensor) -> Tensor:
    """Return the matrix of a linear layer, [outputs, rank]; of one with an adapter, that of both."""
    if type(layer) is nn.Linear:
        return layer.weight
    found: Tensor = layer(torch.eye(rank, dtype=like.dtype, device=like.device)).T
    return found
