"""Hugging Face models and tokenizers, loaded for training, with errors a user can act on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config.model import ModelConfig
from posttrain.errors import ModelError, Problem
from posttrain.models.attention import NAME, register_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the configured chat template.

    Raises: ModelError when there is none, or its template file cannot be read.
    """
    path = expanded(config.tokenizer_path or config.path)
    field = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        problem = Problem(
            f"no tokenizer could be loaded from {path}: {_first_line(error)}",
            fix="a folder needs tokenizer.json and tokenizer_config.json; or set model.tokenizer_path",
            field=field,
        )
        raise ModelError(problem) from error
    if config.chat_template_file:
        try:
            tokenizer.chat_template = Path(config.chat_template_file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(
                Problem(f"chat template cannot be read: {error}", field="model.chat_template_file")
            ) from error
    return tokenizer


def load_causal_lm(
    path: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model with our attention, in eval mode (no dropout), weights in ``dtype``.

    Raises: ModelError when the folder holds no usable model, or an architecture whose attention cannot be replaced.
    """
    register_attention()
    path = expanded(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _refuse_unsupported(config, path)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=NAME, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        problem = Problem(f"no model could be loaded from {path}: {_first_line(error)}", field="model.path")
        raise ModelError(problem) from error
    if not model._supports_attention_backend:
        raise ModelError(
            Problem(
                f"{type(model).__name__} at {path} does not use transformers' attention interface",
                fix="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM model",
                field="model.path",
            )
        )
    return model.to(device).eval()


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a response: the generation config's, the model config's and the tokenizer's, together."""
    ids: set[int] = set()
    for found in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if found is not None:
            ids.update(found if isinstance(found, list) else [found])
    return frozenset(ids)


def expanded(path: str) -> str:
    """``~`` in front of a folder means the user's home; hub ids stay as they are."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _refuse_unsupported(config: object, path: str) -> None:
    """Architectures whose attention does more than ours: better no run than a wrong one."""
    reasons = {
        "attn_logit_softcapping": "soft-capped attention logits",
        "layer_types": "attention layers that are neither full nor sliding-window",
    }
    known_layers = {"full_attention", "sliding_attention"}
    layer_types = set(getattr(config, "layer_types", None) or [])
    found = None
    if getattr(config, "attn_logit_softcapping", None):
        found = reasons["attn_logit_softcapping"]
    elif layer_types - known_layers or getattr(config, "model_type", "") == "gpt_oss":
        found = reasons["layer_types"]
    if found:
        raise ModelError(
            Problem(
                f"{getattr(config, 'model_type', 'this model')} at {path} uses {found}, which is not supported",
                fix="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM model",
                field="model.path",
            )
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
