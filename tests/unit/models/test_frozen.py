"""Weights that are not trained, by the beginnings of their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.errors import ModelError
from posttrain.models.frozen import freeze


@pytest.fixture
def model(tiny_llama: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_llama)
    return loaded


def test_a_frozen_weight_gets_no_gradient_and_the_others_do(model: PreTrainedModel) -> None:
    freeze(model, ["model.layers.0.", "model.norm"])
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    for name, weight in model.named_parameters():
        frozen = name.startswith(("model.layers.0.", "model.norm"))
        assert (weight.grad is None) == frozen, name


def test_tied_weights_are_frozen_by_either_name(model: PreTrainedModel) -> None:
    """The tiny Llama's embeddings are shared; the output's name is no parameter of its own."""
    freeze(model, ["lm_head"])
    assert not model.get_input_embeddings().weight.requires_grad


def test_beginnings_that_match_nothing_are_named(model: PreTrainedModel) -> None:
    with pytest.raises(ModelError) as caught:
        freeze(model, ["model.layers.0.", "model.layer.1.mlp", "audio"])
    first, second = caught.value.problems
    assert (
        "model.freeze names model.layer.1.mlp, and no weight" in first.what and "did you mean model.layers" in first.fix
    )
    assert "model.freeze names audio" in second.what
    assert all(weight.requires_grad for weight in model.parameters())


def test_something_is_left_to_train(model: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="leaves nothing"):
        freeze(model, ["model.", "lm_head"])
