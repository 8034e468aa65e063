"""Tiny random vision-language models with tokenizer and image processor, for tests of images.

Five families, each laid out like its folder on the hub: the model's config and weights, a tokenizer with the family's image
tokens, a chat template that writes the family's placeholder for an image, and the settings of the image processor (the
form that needs PIL only). transformers loads all of it offline and without torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from posttrain.models.saving import save_model
from posttrain.models.tiny import PAD, TURN_END, TURN_START, draw_weights, tiny_tokenizer

VisionFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"]

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
SMOLVLM_TOKENS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
PLACEHOLDERS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
}

PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
}

PATCH, MERGE = 4, 2  # pixels per side of a patch; patches per side of one token

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_vision_model(
    folder: Path,
    family: VisionFamily = "qwen2_vl",
    *,
    seed: int = 0,
    width: int = 32,
    layers: int = 2,
    vision_width: int = 16,
    vision_layers: int = 2,
    image_size: int = 32,
) -> Path:
    """Write a random model of ``family`` with its tokenizer and image processor, as a Hugging Face folder.

    Text: ``layers`` layers of ``width`` (4 heads on 2 key/value heads). Vision: ``vision_layers`` layers of
    ``vision_width``, patches of 4 x 4 pixels, 2 x 2 of which become one token. The Qwen families keep an image's aspect ratio
    and its resolution up to ``image_size``² pixels; SmolVLM scales every image to ``image_size`` x ``image_size``. With the
    default of 32 an image is at most 16 tokens. The same arguments give the same bytes, and the global random state stays
    unchanged.

    Returns: ``folder``, which is created when missing.
    """
    tokenizer = _tokenizer(family)
    vision = {"depth": vision_layers, "image_size": image_size}
    config = _CONFIGS[family](tokenizer, width=width, layers=layers, vision_width=vision_width, **vision)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw_weights(model, seed)
    model.generation_config = GenerationConfig(**_end_ids(tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    _write(folder / "preprocessor_config.json", _preprocessor(family, image_size))
    own = {"image_seq_len": (image_size // PATCH // MERGE) ** 2} if family == "smolvlm" else {}
    _write(folder / "processor_config.json", {"processor_class": PROCESSORS[family], **own})
    return folder


def _tokenizer(family: VisionFamily) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    image_tokens = SMOLVLM_TOKENS if family == "smolvlm" else QWEN_TOKENS
    tokenizer.add_special_tokens({"extra_special_tokens": [TURN_START, *image_tokens]})
    tokenizer.chat_template = CHATML.replace("PLACEHOLDER", PLACEHOLDERS[family])
    return tokenizer


def _end_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = {
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    return {"bos_token_id": None, **ids}


def _text(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        **_end_ids(tokenizer),
    }


def _qwen2_vl(
    tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int, vision_width: int, depth: int, image_size: int
) -> PretrainedConfig:
    vision: dict[str, Any] = {
        "depth": depth,
        "embed_dim": vision_width,
        "hidden_size": width,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    return _qwen("qwen2_vl", tokenizer, _text(tokenizer, width, layers), vision)


def _qwen2_5_vl(
    tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int, vision_width: int, depth: int, image_size: int
) -> PretrainedConfig:
    vision: dict[str, Any] = {
        **_tower(width, vision_width, depth),
        "window_size": 2 * PATCH * MERGE,  # a window of 2 x 2 tokens
        "fullatt_block_indexes": [depth - 1],
    }
    return _qwen("qwen2_5_vl", tokenizer, _text(tokenizer, width, layers), vision)


def _tower(width: int, vision_width: int, depth: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": vision_width,
        "out_hidden_size": width,
        "intermediate_size": 2 * vision_width,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }


def _qwen3_vl(
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int,
    layers: int,
    vision_width: int,
    depth: int,
    image_size: int,
    family: str = "qwen3_vl",
    experts: Mapping[str, Any] = MappingProxyType({}),
) -> PretrainedConfig:
    vision: dict[str, Any] = {
        **_tower(width, vision_width, depth),
        "num_position_embeddings": (image_size // PATCH) ** 2,
        "deepstack_visual_indexes": list(range(min(depth, layers))),
    }
    text = {**_text(tokenizer, width, layers), "head_dim": width // 4, **experts}
    return _qwen(family, tokenizer, text, vision)


def _qwen(
    family: str, tokenizer: PreTrainedTokenizerFast, text: dict[str, Any], vision: dict[str, Any]
) -> PretrainedConfig:
    half = text["hidden_size"] // 4 // 2  # frequencies per head, shared among time, height and width
    time = half - 2 * (half // 3)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [time, half // 3, half // 3],
    }
    if family.startswith("qwen3_vl"):
        rope["mrope_interleaved"] = True  # as published, for vLLM; transformers' class knows it
    start, end, _, image, video = (tokenizer.convert_tokens_to_ids(name) for name in QWEN_TOKENS)
    return AutoConfig.for_model(
        family,
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )


def _smolvlm(
    tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int, vision_width: int, depth: int, image_size: int
) -> PretrainedConfig:
    return AutoConfig.for_model(
        "smolvlm",
        text_config={"model_type": "llama", "head_dim": width // 4, **_text(tokenizer, width, layers)},
        vision_config={
            "hidden_size": vision_width,
            "intermediate_size": 2 * vision_width,
            "num_hidden_layers": depth,
            "num_attention_heads": 2,
            "image_size": image_size,
            "patch_size": PATCH,
        },
        scale_factor=MERGE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": partial(_qwen3_vl, family="qwen3_vl_moe", experts=_EXPERTS),
    "smolvlm": _smolvlm,
}


def _preprocessor(family: VisionFamily, image_size: int) -> dict[str, Any]:
    """Return the settings of the image processor, under the keys of the family's folders on the hub."""
    if family == "smolvlm":
        side = {"longest_edge": image_size}
        return {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": PROCESSORS[family],
            "do_image_splitting": False,
            "do_pad": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "max_image_size": side,
            "size": side,
        }
    fewest, most = (PATCH * MERGE) ** 2, image_size**2
    of_qwen3 = {"size": {"shortest_edge": fewest, "longest_edge": most}}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": PROCESSORS[family],
        **(of_qwen3 if family.startswith("qwen3_vl") else {"min_pixels": fewest, "max_pixels": most}),
        # As published; vLLM reads them from here
        "image_mean": [0.5, 0.5, 0.5] if family.startswith("qwen3_vl") else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if family.startswith("qwen3_vl") else [0.26862954, 0.26130258, 0.27577711],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
