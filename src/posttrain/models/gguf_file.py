"""A model folder as one GGUF file, for llama.cpp and the programs built on it; read back and compared before it counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.errors import ModelError, Problem
from posttrain.models.gguf_layout import Layout
from posttrain.models.gguf_settings import check_family, head_dim, write_settings
from posttrain.models.gguf_tokenizer import write_tokenizer
from posttrain.models.loading import load_model_config

# Kinds of weights that the package gguf can write, by the name that users give.
KINDS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (gguf.GGMLQuantizationType.Q5_1, gguf.LlamaFileType.MOSTLY_Q5_1),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A GGUF file that was read back: every tensor is the model's, rounded to the file's kind of weights."""

    path: Path
    tensors: int
    rounded: int  # of them, in the kind that was requested; norms, biases and odd sizes are kept more precisely
    largest_error: float  # |read back - model's| / largest |model's| of the tensor, over all tensors


def check_kind(kind: str) -> None:
    """Raises: ModelError for a kind of weights that cannot be written here."""
    if kind in KINDS:
        return
    what = f"there is no kind of GGUF weights called {kind!r} (known: {', '.join(KINDS)})"
    fix = "choose q8_0 or f16"
    if kind.lower().startswith(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq")):
        what = f"{kind} is written by llama.cpp alone: the package gguf reads such weights and writes none"
        fix = f"export f16 here, then: llama-quantize MODEL-f16.gguf MODEL-{kind}.gguf {kind}"
    raise ModelError(Problem(what, fix=fix, field="--gguf"))


def write_gguf(folder: Path, out: Path, kind: str) -> Written:
    """Write the model in ``folder`` (of Hugging Face, with its tokenizer) to ``out``, and compare what is read back.

    Raises: ModelError for a kind of weights, a model or a tokenizer that GGUF does not know, or a file that reads otherwise.
    """
    check_kind(kind)
    config = load_model_config(str(folder))
    check_family(config)
    layout = Layout(config)
    quantization, file_type = KINDS[kind]
    beside = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(beside, gguf.MODEL_ARCH_NAMES[layout.family.architecture])
    write_settings(writer, config)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_tokenizer(writer, AutoTokenizer.from_pretrained(folder), config.vocab_size, name=out.stem)
    for name, tensor in _tensors(folder, config, layout):
        chosen = _kind_of(tensor, quantization)
        data = gguf.quantize(tensor.numpy(), chosen)
        writer.add_tensor(name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = _compared(beside, out, dict(_tensors(folder, config, layout)), quantization)
    beside.replace(out)
    return written


def _tensors(folder: Path, config: Any, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors in float32, by GGUF's names and in its order of rows; tied output weights are left out."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                renamed = layout.name(name)
                if renamed is None:
                    raise ModelError(Problem(f"GGUF has no name for the weights {name} of {folder}"))
                yield renamed, layout.write(name, weights.get_tensor(name).float()).contiguous()
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", rope_factors(config.rope_parameters, head_dim(config))
    if config.rope_parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(config.rope_parameters[f"{length}_factor"])


def rope_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """The divisors of the rotary frequencies of Llama 3, [head_dim / 2] float32.

    A frequency whose wave is shorter than original / high_freq_factor tokens stays; one that is longer than original /
    low_freq_factor is divided by factor; between them the two are mixed linearly in original / wavelength.
    Source: Llama 3.1's reference code, as transformers states it (rope type llama3).
    """
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    waves = original / (2 * math.pi / frequencies)  # wavelengths in the original context
    mixed = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - mixed) / factor + mixed)).float()


def _kind_of(tensor: Tensor, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Vectors stay float32, and rows that are no whole number of blocks float16."""
    if tensor.dim() == 1:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _compared(file: Path, out: Path, expected: Mapping[str, Tensor], wanted: gguf.GGMLQuantizationType) -> Written:
    """Read the file with gguf's reader. Raises: ModelError when a tensor is missing or is not the model's, rounded."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if found.keys() != expected.keys():
        raise ModelError(
            Problem(f"{file} holds other tensors than the model: {sorted(found.keys() ^ expected.keys())[:3]}")
        )
    largest, rounded = 0.0, 0
    for name, tensor in expected.items():
        kind = _kind_of(tensor, wanted)
        rounded += kind == wanted
        there = gguf.dequantize(found[name].data, found[name].tensor_type).reshape(tensor.shape)
        if not np.array_equal(there, gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)):
            raise ModelError(
                Problem(f"{name} in {file} reads otherwise than it was written", fix="look after that disk")
            )
        largest = max(largest, float(np.abs(there - tensor.numpy()).max() / (tensor.abs().max() or 1.0)))
    return Written(path=out, tensors=len(expected), rounded=rounded, largest_error=largest)


def named(folder: Path, kind: str) -> Path:
    """The name of a model folder's GGUF file, within it."""
    return folder / f"{folder.resolve().name}-{kind}.gguf"
