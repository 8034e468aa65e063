"""The shape of a model folder: weights counted by headers, and an output layer that is the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.plan.model_shape import read_shape, shape_of

SIZES = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
INNER = 4 * 4 * 4 + 3 * 4 * 8 + 2 * 4  # attention, gated MLP, two norms: 168


def folder(tmp_path: Path, *, head: bool, copies: bool = False) -> str:
    """Write a model of one layer whose config.json says nothing of tied weights, as those of older models."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 4), "model.layers.0.all": torch.zeros(INNER)}
    tensors |= {"model.norm.weight": torch.zeros(4)} | ({"lm_head.weight": torch.zeros(10, 4)} if head else {})
    save_file(tensors, tmp_path / "model.safetensors")
    if copies:
        save_file(tensors, tmp_path / "consolidated.safetensors")
    return str(tmp_path)


def test_a_head_that_is_not_stored_is_the_embedding(tmp_path: Path) -> None:
    shape = read_shape(folder(tmp_path, head=False))
    assert shape is not None and (shape.parameters, shape.outer_parameters) == (INNER + 40 + 4, 40 + 4)
    assert shape.layer_parameters == INNER


def test_weights_that_are_stored_twice_count_once(tmp_path: Path) -> None:
    shape = read_shape(folder(tmp_path, head=True, copies=True))
    assert shape is not None and (shape.parameters, shape.outer_parameters) == (INNER + 80 + 4, 80 + 4)


@pytest.mark.parametrize("queries", [10, None])
def test_latent_attention_and_its_experts_are_counted_as_the_model_has_them(queries: int | None) -> None:
    """Width 32, 4 heads of 10 + 6, latents of 12: cached are 12 + 6 numbers; the first of 3 layers has no experts."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=queries, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=7,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=2, first_k_dense_replace=1,
        n_group=1, topk_group=1, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert (shape.query_width, shape.key_value_width) == (4 * 16, 18)
    assert shape.experts is not None and shape.experts.layers == (False, True, True)
