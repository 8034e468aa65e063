"""Mixes of K-quants: the kinds of tensors and their errors are those of llama.cpp's own quantizer.

``llama_quantize.json`` holds, for the float32 files that this test writes and each mix, what ``llama_model_quantize`` of
llama.cpp (llama-cpp-python 0.3.36) made of them: the names of the tensors of each kind, and per kind the sum of squared
differences from the float32 weights.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.models import gguf_k
from posttrain.models.gguf_file import write_gguf
from posttrain.models.gguf_kinds import check_kind, more_bits
from posttrain.models.tiny import draw_weights, tiny_tokenizer

RECORDED = json.loads(Path(__file__).with_name("llama_quantize.json").read_text())
SIZES = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
# By name: the model type, its width, and other settings
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "untied": ("qwen3", 256, {"num_hidden_layers": 8, "tie_word_embeddings": False, "head_dim": 8}),
    "tied": ("llama", 256, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "narrow": ("llama", 96, {"num_hidden_layers": 3, "tie_word_embeddings": True, "head_dim": 24}),
    "fused": ("phi3", 256, {"num_hidden_layers": 3, "tie_word_embeddings": False}),
}
KIND = gguf.GGMLQuantizationType


def write(folder: Path, name: str) -> Path:
    kind, width, settings = MODELS[name]
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), hidden_size=width, **SIZES, **ids, **settings)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, 0)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def measured(file: Path, plain: Path) -> dict[str, Any]:
    """What ``llama_quantize.json`` holds of a file."""
    weights = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(plain).tensors}
    names: dict[str, list[str]] = defaultdict(list)
    errors: dict[str, float] = defaultdict(float)
    for each in gguf.GGUFReader(file).tensors:
        kind = each.tensor_type.name
        if kind != "F32":
            names[kind].append(each.name)
            there = gguf.dequantize(each.data, each.tensor_type).astype(np.float64)
            errors[kind] += float(np.square(there - weights[each.name]).sum())
    return {"names": {kind: sorted(found) for kind, found in names.items()}, "errors": errors}


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_k_m", "q6_k"])
@pytest.mark.parametrize("name", MODELS)
def test_mixes_are_llama_cpps(tmp_path: Path, name: str, mix: str) -> None:
    folder = write(tmp_path, name)
    plain = write_gguf(folder, tmp_path / "f32.gguf", "f32").path
    written = write_gguf(folder, tmp_path / f"{mix}.gguf", mix)
    found, recorded = measured(written.path, plain), RECORDED[name][mix]
    assert found["names"] == recorded["names"]
    for kind, error in recorded["errors"].items():
        assert found["errors"][kind] == pytest.approx(error, rel=5e-3), kind
    assert gguf.GGUFReader(written.path).fields["general.file_type"].contents() == recorded["file_type"]
    assert sum(written.kinds.values()) == len(gguf.GGUFReader(plain).tensors)


def test_four_bits_by_hand() -> None:
    """Block b is b * 0, 1 ... 15, 0 ... 15: s = 9 b for d = 7 / 63, and its levels are the numbers themselves."""
    block = torch.arange(32) % 16
    row = torch.cat([b * block for b in range(8)]).float()[None]
    packed = gguf_k.quantize(row, KIND.Q4_K)
    assert packed.shape == (1, 144) and packed.dtype == np.uint8
    d, m = packed[0, :4].view(np.float16)
    assert d == np.float16(1 / 9) and m == 0
    # 9 b is 0, 9, 18, 27, then 36 = 0b10_0100, 45 = 0b10_1101, 54 = 0b11_0110 and 63: two upper bits stand above blocks 0-3
    assert packed[0, 4:8].tolist() == [0 | 2 << 6, 9 | 2 << 6, 18 | 3 << 6, 27 | 3 << 6]
    assert packed[0, 8:16].tolist() == [0, 0, 0, 0, 4, 13, 6, 15]
    # Bytes 48-79 of the file are blocks 2 and 3: the same level in both halves
    assert packed[0, 48:80].tolist() == [int(level) * 17 for level in block]
    assert np.allclose(gguf.dequantize(packed, KIND.Q4_K), row.numpy(), rtol=1e-3)


@pytest.mark.parametrize("kind", [KIND.Q4_K, KIND.Q5_K, KIND.Q6_K])
def test_rows_of_any_scale(kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 512, generator=generator) * torch.tensor([1.0, 1e-3, 30.0, 0.0, 1.0, 1.0])[:, None]
    rows[4], rows[5] = rows[4].abs() + 0.5, -0.25
    packed = gguf_k.quantize(rows, kind)
    there = torch.from_numpy(gguf.dequantize(packed, kind))
    # A grid's step is at most 1/14 of the block's range, 0 included; half of it is an error, and as much for rounded scales
    levels = {KIND.Q4_K: 14, KIND.Q5_K: 30, KIND.Q6_K: 31}[kind]
    width = rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)
    assert ((there - rows).abs().amax(1) <= width / levels + 1e-6).all()
    assert torch.equal(there[3], rows[3])
    monkeypatch.setattr(
        gguf_k, "AT_ONCE", 512
    )  # a row at a time: sums in another order may choose another of two equal grids
    again = torch.from_numpy(gguf.dequantize(gguf_k.quantize(rows, kind), kind))
    first, second = ((each - rows).square().sum(1) for each in (there, again))
    assert torch.allclose(first, second, rtol=0.02)


def test_layers_with_more_bits() -> None:
    # Of 16: the first two, the last two (14 = 7 * 16 // 8), and 4, 7, 10, 13: two thirds of three behind the first eighth
    assert [layer for layer in range(16) if more_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


def test_kinds_that_are_not_written() -> None:
    with pytest.raises(ModelError, match=r"q4_k_s is written by llama.cpp alone.*q4_k_m.*llama-quantize"):
        check_kind("q4_k_s")
    with pytest.raises(ModelError, match="known: f32, f16"):
        check_kind("int3")
    with pytest.raises(ModelError, match="write q4_k_m"):
        check_kind("Q4_K_M")
