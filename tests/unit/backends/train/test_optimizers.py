"""Optimizers besides AdamW, by hand and against torch's own; their state comes back from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.backends.torch_training.muon import Muon, orthogonalized
from posttrain.backends.torch_training.optimizers import build_optimizer, set_rates
from posttrain.config import RunConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.matrices import hidden_matrices
from posttrain.plan.checks.train import check, warnings_of


def stepped(weight: list[Any], gradients: list[list[Any]], **settings: Any) -> list[torch.Tensor]:
    """The weight after each update."""
    parameter = nn.Parameter(torch.tensor(weight))
    config = OptimizerConfig(**settings)
    optimizer = build_optimizer({"w": parameter}, config, {"w"} if parameter.dim() == 2 else ())
    found = []
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        set_rates(optimizer, learning_rate=config.lr, weight_decay=config.weight_decay)
        optimizer.step()
        found.append(parameter.detach().clone())
    return found


def test_sgd_by_hand() -> None:
    # g + 0.1 w = 2.1; w = 1 - 0.1 x 2.1 = 0.79
    first, second = stepped([1.0], [[2.0], [0.0]], name="sgd", lr=0.1, weight_decay=0.1)
    assert first.item() == pytest.approx(0.79) and second.item() == pytest.approx(0.79 * 0.99)
    # m = 2, then 0.5 x 2 + 1 = 2: 1 - 0.2 - 0.2
    first, second = stepped([1.0], [[2.0], [1.0]], name="sgd", lr=0.1, weight_decay=0.0, momentum=0.5)
    assert (first.item(), second.item()) == (pytest.approx(0.8), pytest.approx(0.6))


def test_muon_by_hand() -> None:
    # A gradient of rank one, 5 u v^T: its direction is u v^T, times 0.7 to 1.2, times 0.2 sqrt(2)
    weight, gradient = [[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [4.0, 0.0]]
    (found,) = stepped(weight, [gradient], name="muon", lr=0.1, weight_decay=0.5)
    step = torch.tensor([[0.95, 0.0], [0.0, 0.95]]) - found
    size = step.norm().item() / (0.1 * 0.2 * math.sqrt(2))
    assert 0.68 < size < 1.21
    torch.testing.assert_close(step / step.norm(), torch.tensor([[0.6, 0.0], [0.8, 0.0]]), atol=1e-5, rtol=0)


def test_orthogonalized_matrices_have_singular_values_about_one() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((6, 4), (4, 6), (3, 5, 5)):
        found = orthogonalized(torch.randn(shape, generator=generator))
        values = torch.linalg.svdvals(found)
        assert found.shape == shape and values.min() > 0.3 and values.max() < 1.25
    assert not orthogonalized(torch.zeros(2, 3)).any()
    stack = torch.randn(3, 4, 5, generator=generator)
    torch.testing.assert_close(orthogonalized(stack)[1], orthogonalized(stack[1]))


def test_what_is_no_matrix_follows_adamw() -> None:
    gradients = [[0.3, -2.0], [0.1, 0.5], [0.0, -1.0]]
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    ours = stepped([1.0, 2.0], gradients, name="muon", **settings)
    theirs = stepped([1.0, 2.0], gradients, name="adamw", **settings)
    torch.testing.assert_close(ours, theirs)


def test_hidden_matrices_are_those_of_layers(tiny_llama: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    found = hidden_matrices(model)
    assert "model.layers.0.mlp.down_proj.weight" in found and "model.layers.1.self_attn.q_proj.weight" in found
    assert not [name for name in found if "embed" in name or "lm_head" in name or "norm" in name]
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerConfig(name="muon"), found)
    assert isinstance(optimizer, Muon) and [group["matrices"] for group in optimizer.param_groups] == [True, False]
    assert len(optimizer.param_groups[0]["params"]) == len(found)


def test_engines_name_the_optimizers_that_they_lack() -> None:
    def said(engine: str, name: str) -> list[str]:
        sections = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "placement": {"devices": 2}}
        policy = {"engine": engine, "optimizer": {"name": name}}
        return [problem.what for problem in check(RunConfig.model_validate(sections | {"policy": policy}))]

    assert said("fsdp", "muon") == said("fsdp", "sgd") == said("megatron", "sgd") == []
    assert said("deepspeed", "sgd") == ["policy.optimizer.name is sgd, and the engine deepspeed updates with adamw"]
    assert said("megatron", "muon") == [
        "policy.optimizer.name is muon, and the engine megatron updates with adamw or sgd"
    ]


def test_settings_of_other_optimizers_are_reported() -> None:
    def said(**optimizer: Any) -> list[str]:
        sections = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "policy": {"optimizer": optimizer}}
        return warnings_of(RunConfig.model_validate(sections))

    assert said(momentum=0.5) == [
        "policy.optimizer.momentum has no effect: policy.optimizer.name is adamw, which has betas"
    ]
    assert said(name="sgd", momentum=0.5, eps=1e-6) == [
        "policy.optimizer.eps has no effect: policy.optimizer.name is sgd"
    ]
    assert said(name="muon", momentum=0.9, eps=1e-6) == []
