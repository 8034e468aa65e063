"""Widths of known models, for benchmarks with random weights."""

from __future__ import annotations

from typing import Any

# Layers of known models: their widths, and how many of their layers
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "family": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
    },
    "phi3-like": {
        "family": "phi3",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_hidden_layers": 6,
    },
    "olmo2-like": {
        "family": "olmo2",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 6,
    },
    "qwen3-moe-like": {
        "family": "qwen3_moe",
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 6,
    },
    "qwen3.5-like": {
        "family": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_hidden_layers": 8,
    },
    "lfm2-like": {
        "family": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
}
