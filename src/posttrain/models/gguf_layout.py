"""GGUF's names and layouts of the tensors of model families, in both directions.

A family is one that transformers and the package gguf both know, whose tensors are the same up to their names, for Llama the
order of the rows of queries and keys (GGUF pairs neighbouring rows for the rotary embedding, transformers row i with row
i + head_dim / 2), and for Gemma the gains of norms (transformers multiplies by 1 + weight; GGUF holds the sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import torch
from torch import Tensor

from posttrain.errors import ModelError, Problem

GELU_BY_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers in GGUF."""

    architecture: gguf.MODEL_ARCH
    neighbours: bool = False  # rows of queries and keys are in the order of neighbouring pairs
    gains: bool = False  # norms hold 1 + weight
    activation: str = "silu"  # that llama.cpp computes
    ropes: tuple[str, ...] = ("default",)  # rotary embeddings that a file can say
    # Those of attention and MLP: llama.cpp reads them where there are any, knows none, or wants all of them.
    biases: Literal["optional", "none", "all"] = "optional"
    layer_norm: bool = False  # LayerNorm, not RMSNorm
    free_heads: bool = True  # heads may be wider or narrower than the model's width over their number
    rotates_a_part: bool = False  # of a head's width, where partial_rotary_factor is below 1
    own_output: bool = False  # tied output weights are in the file, too
    window_ends_text: bool = False  # a window is not in the file, so a text ends with it
    is_own: bool = False  # its configuration is read by gguf_settings, not by transformers


# By ``model_type`` of transformers.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(gguf.MODEL_ARCH.LLAMA, neighbours=True, ropes=("default", "llama3")),
    "mistral": Family(gguf.MODEL_ARCH.LLAMA, neighbours=True, ropes=("default", "llama3")),
    "qwen2": Family(gguf.MODEL_ARCH.QWEN2, free_heads=False),
    "qwen3": Family(gguf.MODEL_ARCH.QWEN3, biases="none"),
    "gemma": Family(gguf.MODEL_ARCH.GEMMA, gains=True, activation=GELU_BY_TANH, biases="none", is_own=True),
    "gemma2": Family(gguf.MODEL_ARCH.GEMMA2, gains=True, activation=GELU_BY_TANH, biases="none", is_own=True),
    "gemma3_text": Family(
        gguf.MODEL_ARCH.GEMMA3,
        gains=True,
        activation=GELU_BY_TANH,
        ropes=("default", "linear"),
        biases="none",
        is_own=True,
    ),
    "phi3": Family(
        gguf.MODEL_ARCH.PHI3,
        ropes=("default", "longrope"),
        free_heads=False,
        rotates_a_part=True,
        window_ends_text=True,
        is_own=True,
    ),
    "granite": Family(gguf.MODEL_ARCH.GRANITE, neighbours=True, is_own=True),
    "olmo2": Family(gguf.MODEL_ARCH.OLMO2, biases="none", free_heads=False, own_output=True, is_own=True),
    "smollm3": Family(gguf.MODEL_ARCH.SMOLLM3, neighbours=True, biases="none", is_own=True),
    "starcoder2": Family(
        gguf.MODEL_ARCH.STARCODER2,
        activation=GELU_BY_TANH,
        layer_norm=True,
        biases="all",
        free_heads=False,
        window_ends_text=True,
        is_own=True,
    ),
}


class Layout:
    """The tensors of one model. Args: ``config`` of transformers, of a family in FAMILIES."""

    def __init__(self, config: Any):
        self.family = FAMILIES[config.model_type]
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._names = gguf.get_tensor_name_map(self.family.architecture, config.num_hidden_layers)

    def name(self, name: str) -> str | None:
        """GGUF's name for a tensor of transformers, such as blk.0.attn_q.weight; None for one that it has no name for."""
        return self._names.get_name(name, try_suffixes=(".weight", ".bias"))

    def write(self, name: str, tensor: Tensor) -> Tensor:
        """Order the rows of transformers' tensor ``name``, and count its gains, as GGUF does."""
        return self._reordered(name, tensor, (2, -1)) + self._gain(name)

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Order the rows of GGUF's tensor, and count its gains, as transformers does, which calls it ``name``."""
        return self._reordered(name, tensor, (-1, 2)) - self._gain(name)

    def _gain(self, name: str) -> float:
        return 1.0 if self.family.gains and name.endswith("norm.weight") else 0.0

    def _reordered(self, name: str, tensor: Tensor, halves: tuple[int, int]) -> Tensor:
        heads = self._heads.get(name.split(".")[-2]) if self.family.neighbours and "self_attn" in name else None
        if heads is None:
            return tensor
        rows = tensor.shape[0] // heads
        split = [rows // 2 if size == -1 else size for size in halves]
        return tensor.reshape(heads, *split, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def open_file(file: Path) -> gguf.GGUFReader:
    """Open a GGUF file. Raises: ModelError for one that is none, or not whole."""
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        what = f"{file.resolve()} is no GGUF file, or a part of one ({str(error).splitlines()[0]})"
        raise ModelError(Problem(what, fix="name a whole file")) from error


def read_weights(file: Path, layout: Layout, names: list[str]) -> dict[str, Tensor]:
    """Read the tensors of a GGUF file under the names of transformers, in float32.

    Args: ``names`` of the tensors wanted; a name whose tensor is not in the file is left out (tied embeddings).
    """
    stored = {tensor.name: tensor for tensor in open_file(file).tensors}
    found = {}
    for name in names:
        block = stored.get(layout.name(name) or "")
        if block is not None:
            values = torch.from_numpy(gguf.dequantize(block.data, block.tensor_type).copy())
            found[name] = layout.read(name, values).contiguous()
    return found
