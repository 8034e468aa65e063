"""Adapters as GGUF files: base and adapter together are the merged model, in GGUF's own order of rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError
from posttrain.models.gguf_adapter import adapter_of, check_settings, write_adapter_gguf
from posttrain.models.gguf_file import write_gguf
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.tiny import write_tiny_model


def tensors(file: Path) -> dict[str, torch.Tensor]:
    return {each.name: torch.from_numpy(each.data.copy()) for each in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(
    ("family", "rank_stabilised"), [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", False)]
)
def test_base_and_adapter_are_the_merged_model(tmp_path: Path, family: Any, rank_stabilised: bool) -> None:
    base = write_tiny_model(tmp_path / "base", "llama" if family == "mistral" else family)
    if family == "mistral":
        config = (base / "config.json").read_text().replace('"llama"', '"mistral"')
        (base / "config.json").write_text(
            config.replace("LlamaFor", "MistralFor").replace("{", '{"sliding_window": null,', 1)
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=rank_stabilised, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, settings)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapter = tmp_path / "checkpoint/policy"
    adapted.save_pretrained(adapter)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    (tmp_path / "merged").mkdir()
    merge_saved_adapter(adapter, tmp_path / "merged")

    assert adapter_of(tmp_path / "checkpoint") == adapter
    changed = write_adapter_gguf(adapter, tmp_path / "merged", tmp_path / "lora.gguf")
    write_gguf(base, tmp_path / "base.gguf", "f32")
    write_gguf(tmp_path / "merged", tmp_path / "merged.gguf", "f32")
    below, above, whole = (tensors(tmp_path / f"{name}.gguf") for name in ("base", "lora", "merged"))
    fields = gguf.GGUFReader(tmp_path / "lora.gguf").fields
    said = {name: fields[name].contents() for name in ("general.type", "adapter.type", "general.architecture")}
    architecture = "llama" if family == "mistral" else family
    assert said == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    alpha = fields["adapter.lora.alpha"].contents()
    assert alpha == pytest.approx(6 * 2 if rank_stabilised else 6)  # times the root of the rank, 4
    assert changed == 7 * model.config.num_hidden_layers and len(above) == 2 * changed
    for name, weight in whole.items():
        added = above[f"{name}.lora_b"] @ above[f"{name}.lora_a"] * alpha / 4 if f"{name}.lora_a" in above else 0.0
        assert torch.allclose(below[name] + added, weight, atol=1e-6), name


def test_what_llama_cpp_would_not_compute_is_refused(tmp_path: Path) -> None:
    for name, said in (
        ("use_dora", "DoRA"),
        ("alpha_pattern", "alphas by layer"),
        ("modules_to_save", "layers that are"),
    ):
        with pytest.raises(ModelError, match=rf"has {said}.*cannot express; use the merged model"):
            check_settings(SimpleNamespace(**{name: {"a": 1}}), tmp_path)
