"""Sizes and settings of the model families in GGUF's metadata, in both directions, and where llama.cpp would compute otherwise.

llama.cpp decides some of Gemma's settings by itself (src/models/gemma2.cpp, gemma3.cpp and phi3.cpp there): which layers look at
a window only, and by what the products of queries and keys are divided. A model that was configured otherwise is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig

from posttrain.errors import ModelError, Problem
from posttrain.models.gguf_layout import FAMILIES, open_file

# Every n-th layer sees the whole text, the others a window; and the numbers of layers of the largest models, which llama.cpp
# divides by the root of width / heads, where it takes that of the heads' width otherwise.
WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6}
LARGEST = {"gemma2": 46, "gemma3_text": 62}
LOCAL_ROPE_THETA = 10000.0
# For Gemma 2 without a cap, a cap so far away that scores below 50 change by less than 1e-5
NO_CAP = 1e5
HIGH_FREQ_FACTOR = 4.0  # of Llama 3
# Every so many layers one of SmolLM3 has no positions.
WITHOUT_POSITIONS = 4
# Settings that say that there are biases, and a tensor that has one then
BIASES = {"granite": {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}}
# Granite's factors, by the name in its configuration, and in GGUF
FACTORS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def check_family(config: Any) -> None:
    """Raises: ModelError for a model that would not compute the same in llama.cpp."""
    kind = config.model_type
    if kind not in FAMILIES:
        what = f"models of type {kind} are not written as GGUF here (known: {', '.join(FAMILIES)})"
        raise ModelError(Problem(what, fix="convert the exported folder with llama.cpp's convert_hf_to_gguf.py"))
    rope, family = _rope(config), FAMILIES[kind]
    if rope.get("rope_type", "default") not in family.ropes:
        raise ModelError(
            Problem(f"rotary embeddings of type {rope['rope_type']} are not written as GGUF here for {kind}")
        )
    window = getattr(config, "sliding_window", None)
    if window and (kind == "mistral" or getattr(config, "use_sliding_window", False)):
        raise ModelError(
            Problem(f"this {kind} model attends to the last {window} tokens only, which its GGUF cannot say")
        )
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0 and not family.rotates_a_part:
        what = f"llama.cpp rotates whole heads of {kind}, and this model {part:g} of them (partial_rotary_factor)"
        raise ModelError(Problem(what))
    usual = config.hidden_size // config.num_attention_heads
    if not family.free_heads and head_dim(config) != usual:
        what = (
            f"llama.cpp computes {kind} with heads of {usual} numbers, and this model has {head_dim(config)} (head_dim)"
        )
        raise ModelError(Problem(what))
    if family.biases != "optional":
        said = [name for name in ("attention_bias", "mlp_bias", "use_bias") if getattr(config, name, None)]
        if bool(said) != (family.biases == "all"):
            what = "with biases" if family.biases == "all" else "without biases"
            raise ModelError(Problem(f"llama.cpp computes {kind} {what}, and this model is configured otherwise"))
    wanted = family.activation  # llama.cpp's gelu is the approximation by tanh
    act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or wanted
    if act != wanted:
        raise ModelError(Problem(f"llama.cpp computes {kind} with the activation {wanted}, this model with {act}"))
    if kind in WINDOW_PATTERN:
        _check_gemma(config)
    if kind == "smollm3" and list(config.no_rope_layers) != (wanted_layers := with_positions(config.num_hidden_layers)):
        what = f"llama.cpp computes smollm3 with no_rope_layers {wanted_layers}, and this model is configured otherwise"
        raise ModelError(Problem(what))


def with_positions(layers: int) -> list[int]:
    """SmolLM3's no_rope_layers, as llama.cpp takes them: 1 for a layer with positions, 0 for one without."""
    return [int((layer + 1) % WITHOUT_POSITIONS != 0) for layer in range(layers)]


def _check_gemma(config: Any) -> None:
    """Raises: ModelError for a Gemma 2 or 3 whose settings are not those that llama.cpp takes."""
    kind = config.model_type
    differing = {}
    layers = layer_types(kind, config.num_hidden_layers)
    if list(config.layer_types) != layers:
        differing["layer_types"] = f"every {WINDOW_PATTERN[kind]}th layer full_attention"
    if config.query_pre_attn_scalar != (scalar := query_scalar(config)):
        differing["query_pre_attn_scalar"] = str(scalar)
    if getattr(config, "use_bidirectional_attention", None):
        differing["use_bidirectional_attention"] = "false"
    if kind == "gemma3_text":
        capped = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(config, name)]
        differing |= dict.fromkeys(capped, "null")
        if config.rope_parameters["sliding_attention"].get("rope_type", "default") != "default":
            differing["rope_parameters.sliding_attention"] = "rope_type default"
    if differing:
        wanted = ", ".join(f"{name} {value}" for name, value in differing.items())
        raise ModelError(Problem(f"llama.cpp computes {kind} with {wanted}, and this model is configured otherwise"))


def layer_types(kind: str, layers: int) -> list[str]:
    """The kinds of layers that llama.cpp takes for Gemma 2 and 3."""
    every = WINDOW_PATTERN[kind]
    return ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]


def query_scalar(config: Any) -> int:
    """The number by whose root llama.cpp divides the products of queries and keys of Gemma 2 and 3."""
    if config.num_hidden_layers == LARGEST[config.model_type]:
        return int(config.hidden_size // config.num_attention_heads)
    return head_dim(config)


def head_dim(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotated(config: Any) -> int:
    """The part of a head's width that the rotary embedding turns."""
    return int(head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0))


def _rope(config: Any) -> Mapping[str, Any]:
    """The rotary embedding; of Gemma 3, that of the layers that see the whole text."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write everything but the name, the tokenizer and the tensors."""
    kind, rope, width = config.model_type, _rope(config), head_dim(config)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(rotated(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if FAMILIES[kind].layer_norm:
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if kind in WINDOW_PATTERN:
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        # llama.cpp takes 50 and 30 where nothing is written, and divides by a zero
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping or NO_CAP)
        writer.add_final_logit_softcapping(config.final_logit_softcapping or NO_CAP)
    if kind == "granite":
        for name, key in FACTORS.items():
            writer.add_float32(f"{gguf.MODEL_ARCH_NAMES[FAMILIES[kind].architecture]}.{key}", getattr(config, name))
    if kind == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original_context(config))
        writer.add_rope_scaling_attn_factors(longrope_attention(config))


def context_length(config: Any) -> int:
    """The most tokens that llama.cpp computes as transformers does: where a window is not in the GGUF, a text ends with it."""
    longest = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    return min(longest, int(window)) if FAMILIES[config.model_type].window_ends_text and window else longest


def original_context(config: Any) -> int:
    """The context in which a model of rope type longrope was trained first."""
    found = _rope(config).get("original_max_position_embeddings")
    return int(found or config.original_max_position_embeddings)


def longrope_attention(config: Any) -> float:
    """The factor of queries and keys of rope type longrope: sqrt(1 + ln(longest / original) / ln(original)), unless it is given.

    Source: LongRoPE (arXiv:2402.13753) as Phi-3's code and transformers have it.
    """
    original = original_context(config)
    ratio = config.max_position_embeddings / original
    given = _rope(config).get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0


def read_settings(file: Path) -> Any | None:
    """The configuration of a model of a family that ``is_own``; None for another architecture, whose file transformers reads.

    transformers' own reading knows no Gemma 1, Granite, OLMo 2 or SmolLM3, and leaves settings of others at those of one size.
    """
    reader = open_file(file)
    architecture = reader.fields["general.architecture"].contents()
    kinds = {gguf.MODEL_ARCH_NAMES[family.architecture]: kind for kind, family in FAMILIES.items() if family.is_own}
    if architecture not in kinds:
        return None
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{architecture}.{key}")
        return default if field is None else field.contents()

    kind, width = kinds[architecture], value("attention.key_length")
    found: dict[str, Any] = {
        "max_position_embeddings": value("context_length"),
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": width or value("embedding_length") // value("attention.head_count"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)},
    }
    if FAMILIES[kind].layer_norm:
        found["norm_epsilon"] = value("attention.layer_norm_epsilon")
    else:
        found["rms_norm_eps"] = value("attention.layer_norm_rms_epsilon")
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {name: reader.fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    found |= {f"{name}_token_id": None if field is None else field.contents() for name, field in ids.items()}
    found |= {name: f"blk.0.{part}.bias" in tensors for name, part in BIASES.get(kind, {}).items()}
    if kind == "granite":
        found |= {name: value(key) for name, key in FACTORS.items()}
    if kind == "smollm3":
        found["no_rope_layers"] = with_positions(found["num_hidden_layers"])
    if kind == "starcoder2":
        found["sliding_window"] = None  # the context ends with it
    if kind == "phi3":
        found["rope_parameters"] |= _phi_rope(value, tensors, found["head_dim"])
        found["original_max_position_embeddings"] = value(
            "rope.scaling.original_context_length", value("context_length")
        )
    if kind in WINDOW_PATTERN:
        found |= {"sliding_window": value("attention.sliding_window", 4096)}
        found["layer_types"] = layer_types(kind, found["num_hidden_layers"])
        found["query_pre_attn_scalar"] = query_scalar(AutoConfig.for_model(kind, **found))
    if kind == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        found |= {name: cap if 0 < (cap := value(name, usual)) < NO_CAP else None for name, usual in caps.items()}
    if kind == "gemma3_text":
        scaled = {"rope_type": "linear", "factor": value("rope.scaling.factor")} if value("rope.scaling.factor") else {}
        local = {"rope_type": "default", "rope_theta": value("rope.freq_base_swa", LOCAL_ROPE_THETA)}
        found["rope_parameters"] = {
            "full_attention": found["rope_parameters"] | scaled,
            "sliding_attention": local,
        }
    return AutoConfig.for_model(kind, **found)


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


def complete_settings(config: Any, file: Path) -> None:
    """Set what transformers leaves out of the configuration of a file of another family: biases, the width of heads, and the
    rotary embedding of Llama 3. Raises: ModelError for divisors of frequencies that are not Llama 3's.
    """
    reader = open_file(file)
    architecture = reader.fields["general.architecture"].contents()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if width := reader.fields.get(f"{architecture}.attention.key_length"):
        config.head_dim = int(width.contents())
    for name, part in {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}.items():
        if hasattr(config, name):
            setattr(config, name, f"blk.0.{part}.bias" in tensors)
    if "rope_freqs.weight" in tensors:
        factors = [float(factor) for factor in tensors["rope_freqs.weight"].data]
        config.rope_parameters = llama3_rope(factors, config.rope_parameters["rope_theta"], file)


def llama3_rope(factors: Sequence[float], theta: float, file: Path) -> dict[str, Any]:
    """The settings of rope type llama3 that give these divisors of the frequencies, [head_dim / 2].

    The share at which a frequency is mixed is (original / wavelength - low) / (high - low); what is divided by the whole factor
    has 0, what stays has 1. It is a line in 1 / wavelength, from which original / low and high / low follow; low is taken as 1.
    Raises: ModelError when no such settings give them.
    """
    width, factor = 2 * len(factors), max(factors)
    # 1 / wavelength of every frequency
    inverse = [theta ** (-2 * place / width) / (2 * math.pi) for place in range(len(factors))]
    shares = [(1 / each - 1 / factor) / (1 - 1 / factor) if factor > 1 else 1.0 for each in factors]
    mixed = [(x, share) for x, share in zip(inverse, shares, strict=True) if 1e-4 < share < 1 - 1e-4]
    high = HIGH_FREQ_FACTOR
    if len(mixed) > 1:
        (first, one), (last, other) = mixed[0], mixed[-1]
        slope = (one - other) / (first - last)
        below = slope * last - other  # low / (high - low)
        high, original = (1 + 1 / below, slope / below) if below > 0 else (high, 0.0)
    elif mixed:
        original = (mixed[0][1] * (high - 1) + 1) / mixed[0][0]
    else:  # between the shortest wave that is divided and the longest that stays
        stays = [x for x, share in zip(inverse, shares, strict=True) if share > 0.5]
        divided = [x for x, share in zip(inverse, shares, strict=True) if share <= 0.5]
        original = high / min(stays) if stays else 0.5 / max(divided)
    if abs(original - round(original)) < 1e-3 * original:
        original = round(original)
    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    again = rope_factors(found, width).tolist() if original > 0 else []
    if len(again) != len(factors) or any(abs(a - b) > 1e-3 * b for a, b in zip(again, factors, strict=True)):
        raise ModelError(Problem(f"{file} has divisors of rotary frequencies (rope_freqs) that are not Llama 3's"))
    return found


def _phi_rope(value: Any, tensors: Mapping[str, Any], width: int) -> dict[str, Any]:
    found: dict[str, Any] = {"partial_rotary_factor": value("rope.dimension_count", width) / width}
    if "rope_factors_long.weight" in tensors:
        found |= {
            "rope_type": "longrope",
            "short_factor": tensors["rope_factors_short.weight"].data.tolist(),
            "long_factor": tensors["rope_factors_long.weight"].data.tolist(),
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
            "attention_factor": value("rope.scaling.attn_factor", 1.0),
        }
    return found
