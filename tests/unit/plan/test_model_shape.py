"""The shape of a model folder: weights counted by headers, and an output layer that is the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2"])
def test_layers_that_keep_a_state_are_counted_by_their_kind(family: str) -> None:
    """Four layers, the last (lfm2: the third) of attention, whose norms of heads are left out as those of other models are. A
    state is 4 heads x 6 x 5 numbers, and 4 inputs of 2 x 12 + 20 channels; of a convolution, 3 inputs of 32 channels."""
    known, lfm2 = vars(AutoConfig.for_model(family)), family == "lfm2"
    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0, "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    sizes = {name: value for name, value in sizes.items() if name in known}
    kinds = {"layer_types": ["conv", "conv", "full_attention", "conv"]} if lfm2 else LINEAR
    config = AutoConfig.for_model(family, **sizes, **kinds)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    of_heads = {f"{each}_{norm}" for each in "qk" for norm in ("norm", "layernorm")}
    norms = sum(size for name, size in weights.items() if name.split(".")[-2] in of_heads)
    said = config.to_dict()
    shape = shape_of(said)
    assert norms > 0 and shape.parameters == sum(weights.values()) - norms
    assert (shape.attention_layers, shape.states is not None and shape.states.layers) == (1, 3)
    each = 3 * 32 * 2 if lfm2 else 4 * 6 * 5 * 4 + 4 * 44 * 2
    assert shape.cache_bytes(7, 5, 2) == 7 * 2 * 16 * 2 + 5 * 3 * each
    # As older files have it: every fourth layer is one of attention.
    older = {name: value for name, value in said.items() if name != "layer_types"}
    assert lfm2 or shape_of(older | {"full_attention_interval": 4}) == shape
