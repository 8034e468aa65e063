"""Which ways of computing a run's policy gets from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.backends.torch_training import start
from posttrain.config import SftConfig
from posttrain.libraries.cpu_kernels import load

CPU = torch.device("cpu")


def config_with(folder: Path, **model: Any) -> SftConfig:
    return SftConfig.model_validate({"model": {"path": str(folder), **model}, "data": {"train_files": ["none"]}})


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


@pytest.mark.parametrize(
    ("settings", "fused"),
    [({}, True), ({"fused_layers": False}, False), ({"compile": True}, False)],
    ids=["default", "turned off", "left to the compiler"],
)
def test_layers(tiny_llama: Path, settings: dict[str, Any], fused: bool) -> None:
    model, _ = start.load_policy(config_with(tiny_llama, **settings), CPU)
    norm = model.get_submodule("model.norm")
    assert ("forward" in vars(norm)) == fused


def test_float32_products(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(start, "choose_float32_products", lambda: asked.append(True))
    start.load_policy(config_with(tiny_llama, fast_float32=False), CPU)
    assert not asked
    start.load_policy(config_with(tiny_llama), CPU)
    assert asked == [True]
