"""The shape of a model folder: weights counted by headers, and an output layer that is the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from posttrain.plan.model_shape import read_shape

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
