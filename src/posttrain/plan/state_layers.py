"""Layers that keep a state of fixed size instead of keys and values: which of a model's layers they are, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR, CONVOLUTION = "linear_attention", "conv"
EVERY = 4  # layer of full attention, where a file leaves it out
# Kinds of models whose attention has a gate for each number of its result
GATED = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """The layers of a model that keep a state."""

    layers: int  # how many there are
    parameters: int  # weights of one, without norms and MLP
    exact: int  # numbers of a sequence's state in one that are kept in float32
    inputs: int  # numbers of its state that are kept in the compute dtype


def state_layers(text: Mapping[str, Any]) -> StateLayers | None:
    """Read the fields of a config.json; None for a model without such layers. Raises: KeyError for fields it lacks."""
    kinds = _kinds(text)
    hidden = text["hidden_size"]
    if CONVOLUTION in kinds:
        taps = text["conv_L_cache"]
        biases = 5 * hidden if text.get("conv_bias") else 0
        weights = 4 * hidden * hidden + taps * hidden + biases
        return StateLayers(layers=kinds.count(CONVOLUTION), parameters=weights, exact=0, inputs=taps * hidden)
    if LINEAR not in kinds or "linear_key_head_dim" not in text:
        return None
    heads, key_dim, value_dim = (
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
    )
    keys, values = text["linear_num_key_heads"] * key_dim, heads * value_dim
    channels, taps = 2 * keys + values, text["linear_conv_kernel_dim"]
    products = hidden * (channels + 2 * values + 2 * heads)
    return StateLayers(
        layers=kinds.count(LINEAR),
        parameters=products + taps * channels + 2 * heads + value_dim,
        exact=heads * key_dim * value_dim,
        inputs=taps * channels,
    )


def gated_attention(text: Mapping[str, Any]) -> bool:
    """Return True where queries come with gates."""
    return bool(text.get("attn_output_gate", str(text.get("model_type")).startswith(GATED)))


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer."""
    if kinds := text.get("layer_types"):
        return list(kinds)
    if "linear_num_value_heads" not in text:
        return []
    every = text.get("full_attention_interval") or EVERY
    return ["full_attention" if number % every == 0 else LINEAR for number in range(1, text["num_hidden_layers"] + 1)]
