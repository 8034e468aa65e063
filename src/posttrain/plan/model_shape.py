"""The shape of a model, read from its config.json and the headers of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.plan.experts import ExpertLayers, expert_layers
from posttrain.plan.state_layers import StateLayers, gated_attention, state_layers

# What a configuration says in whole numbers, of at least 1 where it says them.
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# The output layer's weights in a file of weights.
HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of the Llama kind."""

    parameters: int
    layers: int
    hidden: int
    query_width: int  # heads x their size
    key_value_width: int  # key/value heads x their size: cached for every token, as often for keys as for values
    heads: int
    key_value_heads: int
    vocabulary: int
    outer_parameters: int  # embeddings, head and last norm: what is in no layer
    experts: ExpertLayers | None = None
    states: StateLayers | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - (self.states.layers if self.states else 0)

    def cache_bytes(self, tokens: float, sequences: float, width: int) -> float:
        """Count the bytes of the keys and values of tokens and of the states of sequences. Args: width, bytes of a number."""
        keys = tokens * 2 * self.attention_layers * self.key_value_width * width
        if self.states is None:
            return keys
        return keys + sequences * self.states.layers * (self.states.exact * 4 + self.states.inputs * width)

    @property
    def layer_parameters(self) -> int:
        return (self.parameters - self.outer_parameters) // self.layers

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts of all layers, without routers and shared experts."""
        return self.experts.parameters(self.hidden) if self.experts else 0


def read_shape(path: str) -> ModelShape | None:
    """Read the shape of the model in a local folder; None when there is none, or its config.json does not say enough."""
    folder = Path(path).expanduser()
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parameters, head = _stored(folder)
        text = values.get("text_config", values)
        if parameters:  # a head that is the embedding is not stored; older files leave the key out
            text = text | {"tie_word_embeddings": not head}
        return shape_of(text, parameters)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # an estimate that cannot be made; what is wrong with the folder is for check_run_files to say


def shape_of(text: Mapping[str, Any], parameters: int = 0) -> ModelShape:
    """Make a shape from the fields of a config.json. Args: parameters as stored, or 0 to count them.

    Raises: KeyError for one that is missing, ValueError for one that is no count (some kinds of models list one per layer).
    """
    said = {name: text[name] for name in COUNTS if text.get(name) is not None}
    if wrong := [name for name, size in said.items() if not isinstance(size, int) or size < 1]:
        raise ValueError(f"{wrong[0]} is not a count")
    if missing := [name for name in NEEDED if name not in said]:
        raise KeyError(missing[0])
    layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    gates = heads if gated_attention(text) else 0
    attention = hidden * head * (heads + gates + 2 * kv_heads) + heads * head * hidden
    if text.get("kv_lora_rank"):
        # Attention is over as many keys as heads. Cached are one latent vector and one rotated key for all of them, twice.
        head, attention = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], _latent_attention(text, hidden, heads)
        key_value_width = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        key_value_width = kv_heads * head
    outer = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2) + hidden
    return ModelShape(
        parameters=parameters or outer + _layers(text, hidden, attention),
        layers=layers,
        hidden=hidden,
        query_width=heads * head,
        key_value_width=key_value_width,
        heads=heads,
        key_value_heads=kv_heads,
        vocabulary=text["vocab_size"],
        outer_parameters=outer,
        experts=expert_layers(text),
        states=state_layers(text),
    )


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Count the weights of a layer's latent attention (models.latent_attention), with its norms."""
    rank, turned, plain = text["kv_lora_rank"], text["qk_rope_head_dim"], text["qk_nope_head_dim"]
    values, of_queries = text["v_head_dim"], heads * (text["qk_nope_head_dim"] + turned)
    first = text.get("q_lora_rank")
    queries = hidden * first + first + first * of_queries if first else hidden * of_queries
    latents = hidden * (rank + turned) + rank + rank * heads * (plain + values)
    return int(queries + latents + heads * values * hidden)


def _layers(text: Mapping[str, Any], hidden: int, attention: int) -> int:
    """Count the weights of all layers: attention, two norms, and a gated MLP or experts with router and shared MLP.

    Args: attention, weights of a layer's; other layers may keep a state.
    """
    layers, experts, states = text["num_hidden_layers"], expert_layers(text), state_layers(text)
    kept = states.layers if states else 0
    each = (layers - kept) * attention + (states.parameters * kept if states else 0) + layers * 2 * hidden
    if experts is None:
        return int(each + layers * 3 * hidden * text["intermediate_size"])
    mixed = sum(experts.layers)
    beside = (
        experts.experts * hidden
        + 3 * hidden * experts.shared_width
        + (hidden if text.get("shared_expert_intermediate_size") else 0)
    )
    plain = (layers - mixed) * 3 * hidden * text["intermediate_size"] if mixed < layers else 0
    return int(each + experts.parameters(hidden) + mixed * beside + plain)


def _stored(folder: Path) -> tuple[int, bool]:
    """Count the weights in the safetensors files by their headers; 0 when there are none. Of the files, those that transformers
    loads: some repositories hold the same weights again as consolidated.safetensors.

    Returns: the count, and True when an output layer is among them.
    """
    count, head = 0, False
    files = sorted(folder.glob("*.safetensors"))
    for file in [each for each in files if each.name.startswith("model")] or files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError(f"{file} is cut off, or no file of safetensors")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                count += math.prod(tensor["shape"])
                head = head or name.endswith(HEADS)
    return count, head
