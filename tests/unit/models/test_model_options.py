"""What a user may change about a model: its configuration, modules of their own, kernels, compilation."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from posttrain.errors import MissingDependency, ModelError
from posttrain.models import compiled
from posttrain.models.compiled import compile_layers
from posttrain.models.liger import use_liger
from posttrain.models.loading import import_modules, load_causal_lm, override_config


def test_fields_of_the_configuration_are_set_before_the_weights_are_loaded(tiny_qwen: Path) -> None:
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    changed = {"max_position_embeddings": 64, "rope_parameters": rope}
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32, config_overrides=changed)
    assert model.config.max_position_embeddings == 64 and model.config.rope_parameters["rope_theta"] == 5000.0
    plain = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    # The second of 4 frequencies of heads of 8: 5000^(-2/8) = 0.1189
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(0.118921, rel=1e-5)
    assert plain.model.rotary_emb.inv_freq[1].item() != pytest.approx(0.118921, rel=1e-3)


def test_mappings_inside_are_joined(tiny_qwen: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_qwen)
    before = dict(config.rope_parameters)
    override_config(config, {"rope_parameters": {"rope_theta": 3.0}})
    assert config.rope_parameters == before | {"rope_theta": 3.0}


def test_field_that_is_not_there_is_refused_with_the_nearest(tiny_qwen: Path) -> None:
    with pytest.raises(ModelError, match="has no field max_position_embedding") as caught:
        load_causal_lm(str(tiny_qwen), dtype=torch.float32, config_overrides={"max_position_embedding": 64})
    assert caught.value.problems[0].fix == "did you mean max_position_embeddings?"
    assert caught.value.problems[0].field == "model.config_overrides"


def test_modules_of_the_user_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_architectures.py").write_text("SEEN = True\n")
    (tmp_path / "my_broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_modules(["my_architectures"])
    assert sys.modules["my_architectures"].SEEN
    for name, reason in (
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("my_broken_module", "ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(ModelError) as caught:
            import_modules([name])
        assert f"{name} cannot be imported: {reason}" in str(caught.value)


def test_liger_needs_a_gpu_and_the_package(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    with pytest.raises(ModelError, match="run on a GPU, and this run is on the CPU"):
        use_liger(model)

    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    elsewhere: Any = OnGpu()
    with pytest.raises(MissingDependency, match=r"pip install 'posttrain\[liger\]'"):
        use_liger(elsewhere)


def test_mlps_and_norms_of_the_layers_are_compiled(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    chosen: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: chosen.append((self, how)))
    # 2 layers with an MLP, the norms before attention and MLP, and those of queries and keys; not the last norm.
    assert compile_layers(model) == 2 * 5
    assert {type(module).__name__ for module, _ in chosen} == {"Qwen3MLP", "Qwen3RMSNorm"}
    assert all(how == {"dynamic": True} for _, how in chosen)


def test_compiling_on_a_cpu_needs_a_compiler(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler") as caught:
        compile_layers(load_causal_lm(str(tiny_qwen), dtype=torch.float32))
    assert caught.value.problems[0].field == "model.compile"
    assert shutil.which is compiled.shutil.which
