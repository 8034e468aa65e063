"""Attention for Hugging Face models, registered through transformers' attention interface.

One registered function serves three layouts; the caller selects one by passing ``attention_layout`` to the model's forward:
``Packed`` (sequences side by side in one row, for training, scoring and prefill), ``SplitRow`` (such a row over several
devices) or ``CachedRows`` (one new token per row against a key/value cache, for decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import pad

from posttrain.errors import ModelError, Problem
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.latent_attention import attend_latent
from posttrain.models.packed_attention import Packed, attend_packed
from posttrain.models.sequence_parallel import SplitRow, attend_split

NAME = "posttrain"

# The fix for a model that is not supported.
KNOWN = "choose a Llama, Qwen, Mistral, Gemma, Phi, OLMo or SmolLM model"

# Keywords by which transformers' models request unsupported features: biases on scores.
NOT_COMPUTED = ("position_bias",)


class Cache(Protocol):
    """Key/value cache of earlier tokens."""

    latent: bool  # of models.latent_attention

    def attend(self, layer: int, query: Tensor, settings: AttentionSettings) -> Tensor:
        """Compute attention of one new token per row, [rows, heads, head_dim], over the tokens visible to that row."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """Layout of decoding: row i holds one new query. Its past is in the cache, which already holds its own key and value."""

    cache: Cache


def register_attention() -> None:
    """Register ``attn_implementation="posttrain"`` with transformers. Safe to call repeatedly."""
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
    attention_layout: Packed | SplitRow | CachedRows | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one layer, in the calling convention of transformers.

    Args: query [B, heads, Q, head_dim]; key, value [B, kv_heads, K, head_dim] with heads a multiple of kv_heads; values may be
        narrower than keys; sliding_window: a query sees at most this many of the latest keys, itself included; softcap c: scores
        x are replaced by c tanh(x / c) (Gemma 2); s_aux [heads]: sinks (gpt-oss), a score of each head that takes a share of the
        weights and adds nothing. Dropout is omitted on purpose: the trainer must score exactly the sampled distribution.
    Returns: [B, Q, heads, width of values], None.
    Raises: ModelError when the model requests a feature that this attention does not compute.
    """
    settings = AttentionSettings(scaling, sliding_window, softcap, s_aux)
    width = value.shape[-1]
    value = pad(value, (0, key.shape[-1] - width))
    if attention_layout is None:
        raise ModelError(
            Problem(
                f"{type(module).__name__} is not given the keywords of its model's forward pass, which hold the packing",
                fix=KNOWN,
                field="model.path",
            )
        )
    more = [name for name in NOT_COMPUTED if unused.get(name) is not None]
    if attention_mask is not None:
        more.append("attention_mask")
    if more:
        raise ModelError(
            Problem(
                f"{type(module).__name__} passes {', '.join(more)} to its attention, which is not supported",
                fix=KNOWN,
                field="model.path",
            )
        )
    if isinstance(attention_layout, CachedRows):
        layer: int = module.layer_idx  # type: ignore[assignment]
        cache = attention_layout.cache

        def attend(asking: Tensor) -> Tensor:
            return cache.attend(layer, asking, settings)

        newest = query[:, :, 0]
        output = (attend_latent(module, newest, attend) if cache.latent else attend(newest))[:, None]
    elif isinstance(attention_layout, SplitRow):
        output = attend_split(query, key, value, attention_layout, *settings)
    else:
        output = attend_packed(query, key, value, attention_layout, *settings)
    return output[..., :width], None
