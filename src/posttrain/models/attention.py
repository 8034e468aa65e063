"""Our attention for Hugging Face models, registered through transformers' attention interface.

One registered function serves two layouts; the caller says which by passing ``attention_layout`` to the model's forward:
``Packed`` (sequences side by side in one row, for training, scoring and prefill) or ``CachedRows`` (one new token per row
against a key/value cache, for decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from posttrain.errors import ModelError, Problem
from posttrain.models.packed_attention import Packed, attend_packed

NAME = "posttrain"

# Keywords by which transformers' models ask for more: soft-capped scores, attention sinks, biases on scores.
NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias")


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """Row i holds one new query, which sees the cached keys where visible[i] is True."""

    visible: Tensor  # [B, cached_len] bool


def register_attention() -> None:
    """Make ``attn_implementation="posttrain"`` known to transformers. Safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_layout: Packed | CachedRows,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the calling convention of transformers.

    Args: query [B, heads, Q, head_dim]; key, value [B, kv_heads, K, head_dim] with heads a multiple of kv_heads;
        sliding_window: a query sees at most so many of the latest keys, itself included. Dropout is left out on purpose:
        the trainer must score what the sampler sampled.
    Returns: [B, Q, heads, head_dim], None.
    Raises: ModelError when the model asks for something that this attention does not compute.
    """
    more = [name for name in NOT_COMPUTED if unused.get(name) is not None]
    if attention_mask is not None:
        more.append("attention_mask")
    if more:
        raise ModelError(
            Problem(
                f"{type(module).__name__} passes {', '.join(more)} to its attention, which is not supported",
                fix="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM model",
                field="model.path",
            )
        )
    if isinstance(attention_layout, Packed):
        return attend_packed(query, key, value, attention_layout, scaling, sliding_window), None
    return _cached(query, key, value, attention_layout.visible, scaling, sliding_window), None


def _cached(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, window: int | None) -> Tensor:
    """The query heads that share a key/value head stand as rows of one query, so keys and values are not repeated."""
    rows, heads, _, head_dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], head_dim)
    if window is not None:
        newest = visible.sum(dim=1, keepdim=True)
        visible = visible & (torch.arange(visible.shape[1], device=visible.device) >= newest - window)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=visible[:, None, None, :], scale=scaling)
    return output.reshape(rows, 1, heads, head_dim)
