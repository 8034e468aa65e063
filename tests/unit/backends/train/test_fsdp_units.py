"""Which modules are gathered together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.backends.train.fsdp.units import units
from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm
from posttrain.plan.engines.fsdp import FsdpSettings


def names(folder: Path, **settings: object) -> list[str]:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module in units(model, FsdpSettings(shard=2, **settings))]  # type: ignore[arg-type]


def test_layers_as_the_model_says(tiny_qwen: Path) -> None:
    assert names(tiny_qwen) == ["model.layers.0", "model.layers.1"]
    assert names(tiny_qwen, one_unit=True) == []


def test_layers_by_name_inner_ones_first(tiny_qwen: Path) -> None:
    found = names(tiny_qwen, layers=("Qwen3DecoderLayer", "Qwen3MLP"))
    assert found == ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.0", "model.layers.1"]
    with pytest.raises(ModelError, match=r"has no layers of the class Qwen3Layer; did you mean Qwen3DecoderLayer\?"):
        names(tiny_qwen, layers=("Qwen3Layer",))


def test_by_size_without_the_output_layer(tiny_qwen: Path) -> None:
    # An MLP has 3 x 32 x 64 = 6144 weights; the rest of a layer 2 x 32 x 32 + 2 x 16 x 32 + 2 x 8 + 2 x 32 = 3152; an embedding
    # 259 x 32 = 8288. The output layer is read by the loss, outside of its own forward pass.
    assert names(tiny_qwen, smallest_unit=6000) == [
        "model.embed_tokens", "model.layers.0.mlp", "model.layers.1.mlp", "model",
    ]  # fmt: skip
    assert names(tiny_qwen, smallest_unit=9000) == ["model.layers.0", "model.layers.1"]


def test_embeddings_that_are_shared_stay_with_the_model(tiny_llama: Path) -> None:
    assert names(tiny_llama, smallest_unit=6000) == ["model.layers.0.mlp", "model.layers.1.mlp", "model"]
