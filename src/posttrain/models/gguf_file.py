"""A model folder as one GGUF file, for llama.cpp and the programs built on it; read back and compared before it counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from posttrain.models.gguf_kinds import KINDS, check_kind, kind_of, rounded
from posttrain.models.gguf_layout import Layout
from posttrain.models.gguf_settings import check_family, head_dim, rope_factors, write_settings
from posttrain.models.gguf_tokenizer import write_tokenizer
from posttrain.models.loading import load_model_config

# A tensor's kind, and the SHA-256 of its bytes.
Stored = tuple[gguf.GGMLQuantizationType, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A GGUF file that was read back: every tensor is the model's, rounded to its kind of weights."""

    path: Path
    tensors: int
    # How many tensors there are of each kind: norms, biases and odd sizes are kept more precisely
    kinds: Mapping[str, int]
    largest_error: float  # |read back - model's| / largest |model's| of the tensor, over all tensors


def write_gguf(folder: Path, out: Path, kind: str) -> Written:
    """Write the model in ``folder`` (of Hugging Face, with its tokenizer) to ``out``, and compare what is read back.

    Raises: ModelError for a kind of weights, a model or a tokenizer that GGUF does not know, or a file that reads otherwise.
    """
    check_kind(kind)
    config = load_model_config(str(folder))
    check_family(config)
    layout = Layout(config)
    mix = KINDS[kind]
    beside = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(beside, gguf.MODEL_ARCH_NAMES[layout.family.architecture])
    write_settings(writer, config)
    writer.add_file_type(mix.file)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_tokenizer(writer, AutoTokenizer.from_pretrained(folder), config.vocab_size, name=out.stem)
    stored: dict[str, Stored] = {}
    for name, tensor in _tensors(folder, config, layout):
        chosen = kind_of(name, tensor, mix, config)
        data = rounded(tensor, chosen)
        writer.add_tensor(name, data, raw_dtype=chosen)
        stored[name] = chosen, _digest(data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = _compared(beside, out, _tensors(folder, config, layout), stored)
    beside.replace(out)
    return written


def _tensors(folder: Path, config: Any, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The tensors in float32, by GGUF's names and in its order of rows; tied output weights are left out where the family
    allows it."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                renamed = layout.name(name)
                if renamed is None:
                    raise ModelError(Problem(f"GGUF has no name for the weights {name} of {folder}"))
                tensor = layout.write(name, weights.get_tensor(name).float()).contiguous()
                yield renamed, tensor
                if config.tie_word_embeddings and layout.family.own_output and renamed == "token_embd.weight":
                    yield "output.weight", tensor
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", rope_factors(config.rope_parameters, head_dim(config))
    if config.rope_parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(config.rope_parameters[f"{length}_factor"])


def _compared(file: Path, out: Path, expected: Iterable[tuple[str, Tensor]], stored: Mapping[str, Stored]) -> Written:
    """Read the file with gguf's reader. Raises: ModelError when a tensor is missing, or its bytes are not those written."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if found.keys() != stored.keys():
        raise ModelError(
            Problem(f"{file} holds other tensors than the model: {sorted(found.keys() ^ stored.keys())[:3]}")
        )
    largest = 0.0
    for name, tensor in expected:
        there = found[name]
        if (there.tensor_type, _digest(there.data)) != stored[name]:
            raise ModelError(
                Problem(f"{name} in {file} reads otherwise than it was written", fix="look after that disk")
            )
        values = gguf.dequantize(there.data, there.tensor_type).reshape(tensor.shape)
        largest = max(largest, float(np.abs(values - tensor.numpy()).max() / (tensor.abs().max() or 1.0)))
    counts = Counter(kind.name for kind, _ in stored.values())
    return Written(path=out, tensors=len(stored), kinds=dict(counts.most_common()), largest_error=largest)


def _digest(data: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).digest()


def named(folder: Path, kind: str) -> Path:
    """The name of a model folder's GGUF file, within it."""
    return folder / f"{folder.resolve().name}-{kind}.gguf"
