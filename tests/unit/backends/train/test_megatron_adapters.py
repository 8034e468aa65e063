"""Adapters that megatron's layers have no place for are refused, under the name of the role that asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("megatron.core")

from posttrain.backends.train.megatron.adapters import put_adapters
from posttrain.backends.train.megatron.weights import Heads
from posttrain.config.lora import LoraConfig
from posttrain.errors import ModelError, Problem
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter
from posttrain.models.tiny import write_tiny_model
from posttrain.models.value_head import head_name, load_value_model

pytestmark = pytest.mark.slow  # megatron-core takes five seconds to import
HEADS = Heads(key_value=2, per_group=2, dim=8)


def with_adapter(role: str, lora: LoraConfig, tmp_path: Path) -> PreTrainedModel:
    folder = str(write_tiny_model(tmp_path, "qwen2_moe"))  # one expert is shared by all tokens
    if role == "policy":
        model = load_causal_lm(folder, dtype=torch.float32, device="cpu")
        add_adapter(model, lora, seed=1)
    else:
        model = load_value_model(folder, dtype=torch.float32, device="cpu")
        add_adapter(model, lora, seed=1, head=head_name(model), field="critic.lora")
    return model


def problem_of(model: PreTrainedModel) -> Problem:
    unused: Any = None  # it is refused before a layer is looked at
    with pytest.raises(ModelError) as raised:
        put_adapters([], model, HEADS, unused)
    (problem,) = raised.value.problems
    return problem


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("targets", [["down_proj"], ["q_proj", "gate_proj"], "all-linear"])
def test_an_expert_that_all_tokens_share_gets_no_adapter(role: str, targets: list[str] | str, tmp_path: Path) -> None:
    problem = problem_of(with_adapter(role, LoraConfig(rank=2, target_modules=targets), tmp_path))
    assert problem.what.startswith("megatron has no adapter for model.layers.1.mlp.shared_expert")
    assert problem.field == f"{role}.lora.target_modules"
    assert "o_proj" in problem.fix and "or use the engine fsdp" in problem.fix


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_inputs_are_not_dropped_out(role: str, tmp_path: Path) -> None:
    problem = problem_of(with_adapter(role, LoraConfig(rank=2, target_modules=["q_proj"], dropout=0.1), tmp_path))
    assert problem.field == f"{role}.lora.dropout"
    assert problem.fix == f"use {role}.lora.dropout=0, or the engine fsdp"
