"""Adapters on 4-bit weights: every reader of the model has the weights that the trainer multiplies by."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from adapters import adapted
from posttrain.config.lora import LoraConfig
from posttrain.errors import MissingDependency, ModelError
from posttrain.models import lora, quantized
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.loading import load_causal_lm
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.packed_attention import packed_layout

NF4 = LoraConfig(rank=2, alpha=3.0, quantize="nf4", target_modules=["q_proj", "down_proj"])


def logits(model: nn.Module) -> Tensor:
    ids, positions = torch.arange(40, 52)[None], torch.arange(12)[None]
    found: Tensor = model(input_ids=ids, position_ids=positions, attention_layout=packed_layout([12])).logits[0]
    return found


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_linear_layers_are_rounded_and_nothing_else(served_model: Path, kind: str) -> None:
    plain = load_causal_lm(str(served_model), dtype=torch.float32)
    model = adapted(served_model, NF4.model_copy(update={"quantize": kind, "quantize_scales": False}))
    state = quantized.plain_state(model, model.state_dict())
    for name, weight in plain.state_dict().items():
        found = state.get(name, state.get(name.replace(".weight", ".base_layer.weight")))
        assert found is not None and found.shape == weight.shape
        inside = ".layers." in name and weight.dim() == 2
        assert torch.equal(found, weight) != inside
        if inside:
            # Neighbours among the 16 values of a block are at most a third of its largest weight apart (fp4: 1 and 2/3).
            moved, largest = ((each.reshape(-1, 64).abs().amax(1)) for each in (found - weight, weight))
            assert (moved <= largest / 6 + 1e-6).all()
            assert len((found.flatten()[:64]).unique()) <= 16
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" in name} == {torch.float32}
    everything = sum(weight.numel() for name, weight in plain.named_parameters())
    adapter = sum(weight.numel() for name, weight in model.named_parameters() if "lora_" in name)
    assert f" of {everything + adapter:,} weights" in lora.trained_share(model)


def test_sampler_trainer_and_export_have_the_same_weights(served_model: Path, tmp_path: Path) -> None:
    model = adapted(served_model, NF4)
    wanted = logits(model).detach()
    plain = load_causal_lm(str(served_model), dtype=torch.float32)
    assert (logits(plain) - wanted).abs().max() > 0.01
    plain.load_state_dict(dict(hugging_face_weights(model)), strict=False)
    torch.testing.assert_close(logits(plain).detach(), wanted, rtol=1e-4, atol=1e-4)
    for name, module in model.named_modules():  # layer by layer, those without an adapter included
        if name.endswith(("_proj", "_proj.base_layer")) and not name.endswith("base_layer"):
            effective = lora.effective_weight(module)
            assert effective.shape == plain.get_submodule(name).weight.shape
            torch.testing.assert_close(effective, plain.get_submodule(name).weight.data, rtol=0, atol=1e-6)

    folder = tmp_path / "adapter"
    folder.mkdir()
    lora.write_own_adapter(model, folder)
    AutoTokenizer.from_pretrained(served_model).save_pretrained(folder)
    how = json.loads((folder / quantized.FILE).read_text())
    assert how == {"kind": "nf4", "scales": True, "block": 64, "dtype": "float32"}
    merge_saved_adapter(folder, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in hugging_face_weights(model):
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=1e-6)


def test_only_the_adapter_gets_gradients_and_off_it_is_the_rounded_base(served_model: Path) -> None:
    model = adapted(served_model, NF4, torch.bfloat16)
    logits(model).float().square().mean().backward()
    with_gradient = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert with_gradient and all("lora_" in name for name in with_gradient)
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" in name} == {torch.bfloat16}
    with torch.no_grad(), lora.adapter_off(model):
        off = logits(model)
    bare = load_causal_lm(str(served_model), dtype=torch.bfloat16)
    quantized.quantize_base(bare, NF4, head=None, field="policy.lora")
    assert torch.equal(off, logits(bare).detach())


def test_the_bytes_are_those_of_the_plan(served_model: Path) -> None:
    from posttrain.plan.engine import quantized_bytes
    from posttrain.plan.model_shape import read_shape

    shape = read_shape(str(served_model))
    assert shape is not None
    for scales in (False, True):
        model = load_causal_lm(str(served_model), dtype=torch.bfloat16)
        quantized.quantize_base(
            model, NF4.model_copy(update={"quantize_scales": scales}), head=None, field="policy.lora"
        )
        held = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        for module in model.modules():
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            held += 0 if state is None else state.absmax.numel() * state.absmax.element_size()
            held += 0 if state is None or not scales else state.state2.absmax.numel() * 4
        assert held == pytest.approx(quantized_bytes(shape, 2, scales_quantized=scales), rel=0.02)


def test_layers_of_no_whole_blocks_are_refused(tiny_llama: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    with pytest.raises(ModelError, match="has 32 inputs, which are no whole blocks of 64"):
        lora.add_adapter(model, NF4)


def test_without_the_library(served_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = load_causal_lm(str(served_model), dtype=torch.float32)
    with pytest.raises(MissingDependency, match=r"needed by policy.lora\).*posttrain\[qlora\]"):
        lora.add_adapter(model, NF4)


def test_only_the_warning_of_the_import_is_silenced(logged: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quantized.without_kernel_notice():
        logger.warning("Failed to load CPU gemm_4bit_forward")
        logger.error("broken")
    logger.warning("later")
    assert [record.getMessage() for record in logged] == ["broken", "later"]
