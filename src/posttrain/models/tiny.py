"""A tiny random model with its tokenizer, created in a fraction of a second, for tests.

The weights are spread widely enough that the next-token distribution is far from uniform and depends on every part of
the model (norms, biases, attention over positions), so that an error in any of them shows in the numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from posttrain.models.saving import save_model

EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
# Llama shares its input and output embeddings here, as the demo model does; the other families do not.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},  # has biases on queries, keys and values
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False},  # has norms on queries and keys
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True, **EXPERTS},
    # One expert is shared by all tokens, and the weights of the chosen ones do not sum to 1. The first layer has no experts.
    "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0],
        **EXPERTS,
    },
    "mixtral": {"num_local_experts": 4, **EXPERTS},
}  # fmt: skip
Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral"]

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, family: Family = "llama", *, seed: int = 0, layers: int = 2) -> Path:
    """Write a random model of ``layers`` layers of ``family`` and its tokenizer into ``folder``, as a Hugging Face folder.

    Width 32, 4 heads on 2 key/value heads, 259 token ids, float32, about 150 kB. The same seed gives the same bytes,
    and the global random state stays unchanged.

    Returns: ``folder``, which is created when missing.
    """
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        **ids,
        **FAMILIES[family],
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed)
    model.generation_config = GenerationConfig(**ids)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from ``seed``, in the order of their names: norm gains around 1, all else around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte (its id is the byte) and ChatML's three, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
