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
from posttrain.models.gguf_layout import FAMILIES, Layout
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
    _write_sizes(writer, config, out.stem)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_tokenizer(writer, AutoTokenizer.from_pretrained(folder), config.vocab_size)
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


def check_family(config: Any) -> None:
    """Raises: ModelError for a model that would not compute the same in llama.cpp."""
    kind = config.model_type
    if kind not in FAMILIES:
        what = f"models of type {kind} are not written as GGUF here (known: {', '.join(FAMILIES)})"
        raise ModelError(Problem(what, fix="convert the exported folder with llama.cpp's convert_hf_to_gguf.py"))
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ("default", "llama3"):
        raise ModelError(Problem(f"rotary embeddings of type {rope} are not written as GGUF here"))
    window = getattr(config, "sliding_window", None)
    if window and (kind == "mistral" or getattr(config, "use_sliding_window", False)):
        raise ModelError(
            Problem(f"this {kind} model attends to the last {window} tokens only, which its GGUF cannot say")
        )


def _write_sizes(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    head_dim = _head_dim(config)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


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
        yield "rope_freqs.weight", rope_factors(config.rope_parameters, _head_dim(config))


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


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
