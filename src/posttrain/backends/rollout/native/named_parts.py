"""Parts of a model by the names that transformers' models have for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LAYERS = ("layers", "h")
ATTENTIONS = ("self_attn", "attention", "attn")
# The last one of a body
NORMS = ("norm", "final_layernorm", "embedding_norm", "final_layer_norm", "ln_f")
# Vectors of positions, which are added to those of tokens
PLACES = "wpe"


def layers_of(body: Any) -> Sequence[Any]:
    """Return the layers of a model's body; none where they have no known name."""
    return next((getattr(body, name) for name in LAYERS if hasattr(body, name)), ())


def attention_of(layer: Any) -> Any:
    """Return the attention of a layer; None where it has none of a known name."""
    return next((part for name, part in layer.named_children() if name in ATTENTIONS), None)


def last_norm_of(body: Any) -> Any:
    """Return the norm behind the layers; None where it has no known name."""
    return next((getattr(body, name) for name in NORMS if hasattr(body, name)), None)


def rotary_of(body: Any) -> Any:
    """Return the module that has the angles of position embeddings; None where there is none."""
    return getattr(body, "rotary_emb", None)
