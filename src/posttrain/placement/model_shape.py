"""What of a model decides its size, read from its config.json and the headers of its weights. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of the Llama kind."""

    parameters: int
    layers: int
    hidden: int
    query_width: int  # heads x their size
    key_value_width: int  # key/value heads x their size
    heads: int
    key_value_heads: int
    vocabulary: int
    outer_parameters: int  # embeddings, head and last norm: what is in no layer

    @property
    def layer_parameters(self) -> int:
        return (self.parameters - self.outer_parameters) // self.layers


def read_shape(path: str) -> ModelShape | None:
    """The shape of the model in a local folder; None when there is none, or its config.json does not say enough."""
    folder = Path(path).expanduser()
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return shape_of(values.get("text_config", values), _stored(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # an estimate that cannot be made; what is wrong with the folder is for check_run_files to say


def shape_of(text: Mapping[str, Any], parameters: int = 0) -> ModelShape:
    """From the fields of a config.json. Args: parameters as stored; 0 counts them. Raises: KeyError for fields it lacks."""
    layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    outer = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2) + hidden
    return ModelShape(
        parameters=parameters or outer + layers * _layer(text, hidden, heads, kv_heads, head),
        layers=layers,
        hidden=hidden,
        query_width=heads * head,
        key_value_width=kv_heads * head,
        heads=heads,
        key_value_heads=kv_heads,
        vocabulary=text["vocab_size"],
        outer_parameters=outer,
    )


def _layer(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head: int) -> int:
    """Weights of one layer: attention, a gated MLP (one for each expert where there are some), two norms."""
    attention = hidden * head * (heads + 2 * kv_heads) + heads * head * hidden
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    return int(attention + 3 * hidden * inner * experts + 2 * hidden)


def _stored(folder: Path) -> int:
    """Weights in the safetensors files, read off their headers; 0 when there are none."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for dimension in tensor["shape"]:
                    size *= dimension
                count += size
    return count
