"""Kinds of GGUF weights by the name that users give, and which tensor of a model gets which: mixes keep some in more bits.

Source of the mixes q4_k_m and q5_k_m: llama.cpp's llama-quantize without an importance matrix, for models without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from posttrain.errors import ModelError, Problem
from posttrain.models import gguf_k

Kind = gguf.GGMLQuantizationType
File = gguf.LlamaFileType


@dataclass(frozen=True, slots=True)
class Mix:
    """``most`` is the kind of most matrices, ``more`` that of values and the last feed-forward matrix in about half the layers;
    None: the same as ``most``."""

    file: gguf.LlamaFileType
    most: gguf.GGMLQuantizationType
    more: gguf.GGMLQuantizationType | None = None


KINDS: Mapping[str, Mix] = {
    "f32": Mix(File.ALL_F32, Kind.F32),
    "f16": Mix(File.MOSTLY_F16, Kind.F16),
    "bf16": Mix(File.MOSTLY_BF16, Kind.BF16),
    "q8_0": Mix(File.MOSTLY_Q8_0, Kind.Q8_0),
    "q6_k": Mix(File.MOSTLY_Q6_K, Kind.Q6_K),
    "q5_k_m": Mix(File.MOSTLY_Q5_K_M, Kind.Q5_K, more=Kind.Q6_K),
    "q5_1": Mix(File.MOSTLY_Q5_1, Kind.Q5_1),
    "q5_0": Mix(File.MOSTLY_Q5_0, Kind.Q5_0),
    "q4_k_m": Mix(File.MOSTLY_Q4_K_M, Kind.Q4_K, more=Kind.Q6_K),
    "q4_1": Mix(File.MOSTLY_Q4_1, Kind.Q4_1),
    "q4_0": Mix(File.MOSTLY_Q4_0, Kind.Q4_0),
}
# For rows that are no whole number of 256 weights.
SMALLER_BLOCKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}


def check_kind(kind: str) -> None:
    """Raises: ModelError for a kind of weights that cannot be written here."""
    if kind in KINDS:
        return
    what = f"there is no kind of GGUF weights called {kind!r} (known: {', '.join(KINDS)})"
    fix = "choose q8_0, q4_k_m or f16"
    if kind.lower() in KINDS:
        fix = f"write {kind.lower()}"
    elif kind.lower().startswith(("q2_k", "q3_k", "q4_k", "q5_k", "iq")):
        what = f"{kind} is written by llama.cpp alone"
        fix = (
            f"choose q4_k_m or q5_k_m, or export f16 here, then: llama-quantize MODEL-f16.gguf MODEL-{kind}.gguf {kind}"
        )
    raise ModelError(Problem(what, fix=fix, field="--gguf"))


def kind_of(name: str, tensor: Tensor, mix: Mix, config: Any) -> gguf.GGMLQuantizationType:
    """The kind of one tensor. Args: GGUF's ``name``; ``tensor`` as it is written; ``config`` of transformers.

    Vectors stay float32. Where ``most`` is a K-quant, the output matrix, which tied embeddings are too, has Q6_K, and rows that
    are no whole number of blocks get a kind of smaller blocks (Q8_0 the output's). Rows that fit no block stay float16.
    """
    if tensor.dim() == 1:
        return Kind.F32
    columns, kind = tensor.shape[-1], mix.most
    if mix.most in SMALLER_BLOCKS:
        kind = _of_the_mix(name, mix, config)
        if columns % gguf_k.SUPER:
            kind = SMALLER_BLOCKS[kind]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return Kind.F16 if columns % block else kind


def _of_the_mix(name: str, mix: Mix, config: Any) -> gguf.GGMLQuantizationType:
    layers = config.num_hidden_layers
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return Kind.Q6_K
    part = name.removesuffix(".weight").rpartition(".")[2]
    kind = mix.most
    if (
        part in ("attn_v", "attn_qkv", "ffn_down")
        and mix.more is not None
        and more_bits(int(name.split(".")[1]), layers)
    ):
        kind = mix.more
    # Of the models of 70 billion weights, whose values are an eighth of the queries: llama.cpp knows them by their layers.
    if part == "attn_v" and layers == 80 and config.num_key_value_heads < config.num_attention_heads:
        kind = Kind.Q5_K if kind == Kind.Q4_K else kind
    return kind


def more_bits(layer: int, layers: int) -> bool:
    """Return True for the first and the last eighth of the layers and every third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def rounded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return a float32 tensor as the bytes, or numbers, of a kind."""
    if kind in SMALLER_BLOCKS:
        return gguf_k.quantize(tensor, kind)
    return gguf.quantize(tensor.numpy(), kind)
