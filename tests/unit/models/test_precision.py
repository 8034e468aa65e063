"""Exported weights in another precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.models.precision import convert_weights


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_weights_are_rounded_and_the_configuration_says_so(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    shutil.copytree(tiny_llama, tmp_path / "out")
    before = load_file(tmp_path / "out/model.safetensors")
    convert_weights(tmp_path / "out", name)
    after = load_file(tmp_path / "out/model.safetensors")
    dtype = getattr(torch, name)
    assert all(torch.equal(after[key], tensor.to(dtype)) for key, tensor in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_the_index_of_several_files_has_the_new_size(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file(
            {f"w{number}": torch.ones(4), "n": torch.arange(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors"
        )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 64}, "weight_map": {}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "text_config": {"torch_dtype": "float32"}}))
    convert_weights(tmp_path, "bfloat16")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * (4 * 2 + 2 * 8)  # integers stay
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16"},
    }


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1e5])}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="w holds 100000, which float16 cannot; use --dtype bfloat16"):
        convert_weights(tmp_path, "float16")
