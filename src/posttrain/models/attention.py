"""Our attention for Hugging Face models, registered through transformers' attention interface.

One registered function serves three layouts; the caller says which by passing ``attention_layout`` to the model's forward:
``Packed`` (sequences side by side in one row, for training, scoring and prefill), ``SplitRow`` (such a row over several
devices) or ``CachedRows`` (one new token per row against a key/value cache, for decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from posttrain.errors import ModelError, Problem
from posttrain.models.packed_attention import Packed, attend_packed
from posttrain.models.sequence_parallel import SplitRow, attend_split

NAME = "posttrain"

# Keywords by which transformers' models ask for more: soft-capped scores, attention sinks, biases on scores.
NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias")


class Cache(Protocol):
    """Keys and values of earlier tokens."""

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None = None) -> Tensor:
        """Attention of one new token per row, [rows, heads, head_dim], to what its row may see."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """Row i holds one new query. Its past is in the cache, where the layer has stored its key and value already."""

    cache: Cache


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
    attention_layout: Packed | SplitRow | CachedRows,
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
    if isinstance(attention_layout, SplitRow):
        return attend_split(query, key, value, attention_layout, scaling, sliding_window), None
    output = attention_layout.cache.attend(module.layer_idx, query[:, :, 0], scaling, sliding_window)  # type: ignore[arg-type]
    return output[:, None], None
