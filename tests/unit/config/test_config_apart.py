"""A configuration apart from the weights: which of its fields count, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from posttrain.backends.torch_training.start import load_policy
from posttrain.config import RunConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.model import ModelConfig
from posttrain.errors import ConfigError
from posttrain.plan.files import check_model_files


@pytest.fixture
def apart(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model's configuration with a wider tolerance, written by an older library."""
    values = json.loads((tiny_llama / "config.json").read_text())
    values |= {"rms_norm_eps": 0.25, "transformers_version": "4.0"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_fields_that_differ_count_and_those_written_out_stand_above_them(apart: Path, tiny_llama: Path) -> None:
    model = ModelConfig(path=str(tiny_llama), config_path=str(apart))
    assert overrides_of(model) == {"rms_norm_eps": 0.25}
    assert overrides_of(model.model_copy(update={"config_path": str(apart / "config.json")})) == {"rms_norm_eps": 0.25}
    assert overrides_of(model.model_copy(update={"config_overrides": {"rms_norm_eps": 0.5}})) == {"rms_norm_eps": 0.5}
    assert overrides_of(ModelConfig(path=str(tiny_llama))) == {}


def test_the_policy_is_loaded_with_them(apart: Path, tiny_llama: Path) -> None:
    sections = {"data": {"train_files": ["x"]}, "placement": {"device": "cpu"}}
    model = {"path": str(tiny_llama), "config_path": str(apart)}
    loaded, _ = load_policy(RunConfig.model_validate({"model": model} | sections), torch.device("cpu"))
    assert loaded.config.rms_norm_eps == 0.25


def test_another_kind_of_model_or_no_file_is_refused(apart: Path, tiny_llama: Path) -> None:
    model = ModelConfig(path=str(tiny_llama), config_path=str(apart))
    (apart / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"is of a qwen2, and the weights in .* are of a llama"):
        overrides_of(model)
    shutil.rmtree(apart)
    [problem] = check_model_files(model)
    assert problem.field == "model.config_path" and "cannot be read" in problem.what
