"""Hugging Face models and tokenizers, loaded for training, with errors a user can act on."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from posttrain.config.model import ModelConfig
from posttrain.errors import ModelError, Problem, did_you_mean
from posttrain.libraries.git_lfs import without_git_lfs
from posttrain.models.attention import NAME, register_attention
from posttrain.models.vision import CHOOSE, has_vision, reads_images

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the configured chat template.

    Raises: ModelError when there is none, or its template file cannot be read.
    """
    path = expanded(config.tokenizer_path or config.path)
    field = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception for files it cannot read
        if (Path(path) / "config.json").exists():
            load_model_config(path, config.trust_remote_code, field=field)  # it is read first, and may be what is wrong
        raise ModelError(_no_tokenizer(path, first_line(error), field)) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # Without tokenizer files, transformers guesses a class from the model's and makes one that knows no text.
        raise ModelError(_no_tokenizer(path, "there are no tokenizer files", field))
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processors_template(path)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if config.chat_template_file:
        try:
            tokenizer.chat_template = Path(config.chat_template_file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(
                Problem(f"chat template cannot be read: {error}", field="model.chat_template_file")
            ) from error
    return tokenizer


def _processors_template(path: str) -> str | None:
    """The chat template that older vision models keep beside their processor, chat_template.json; None without one."""
    # transformers' own flags: a file that is not there, or a hub that is out of reach, is no error
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, "chat_template.json", **quiet)
    if file is None:
        return None
    try:
        template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{file} holds no chat template: {type(error).__name__}: {first_line(error)}"
        raise ModelError(Problem(what, fix="copy the model again", field="model.path")) from error
    return str(template)


def load_model_config(path: str, trust_remote_code: bool = False, *, field: str = "model.path") -> PretrainedConfig:
    """A model's own configuration, as transformers understands it; ``field`` is the setting that named it.

    Raises: ModelError when there is none, or it is of an unknown kind.
    """
    path = expanded(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a file's values make its class do
        problem = Problem(f"no model could be loaded from {path}: {first_line(error)}", field=field)
        raise ModelError(problem) from error
    return config


def import_modules(names: Sequence[str]) -> None:
    """Import modules of the user's, which may register architectures with transformers.

    Raises: ModelError for one that cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # it is the user's code: whatever it raises is told
            what = f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}"
            fix = "install it, or put its folder on PYTHONPATH"
            raise ModelError(Problem(what, fix=fix, field="model.external_modules")) from error


def override_config(config: PretrainedConfig, overrides: Mapping[str, Any], *, at: str = "") -> None:
    """Set fields of a model's configuration; a mapping goes into the configuration or mapping of that name.

    Raises: ModelError for a field that the configuration does not have.
    """
    for name, value in overrides.items():
        if not hasattr(config, name):
            what = f"the configuration of {getattr(config, 'model_type', 'this model')} has no field {at}{name}"
            fix = did_you_mean(name, list(config.to_dict()))
            raise ModelError(Problem(what, fix=fix, field="model.config_overrides"))
        old = getattr(config, name)
        if isinstance(value, Mapping) and isinstance(old, PretrainedConfig):
            override_config(old, value, at=f"{at}{name}.")
        else:
            setattr(config, name, {**old, **value} if isinstance(value, Mapping) and isinstance(old, dict) else value)


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model with our attention, in eval mode (no dropout), weights in ``dtype``; or a vision-language model
    with it in its language model, and transformers' own in its tower.

    Raises: ModelError when the folder holds no usable model, lacks some of its weights, or is of an architecture whose
        attention cannot be replaced.
    """
    disable_progress_bar()  # one per weight file, over our own display
    register_attention()
    path = expanded(path)
    model: PreTrainedModel
    try:
        config = load_model_config(path, trust_remote_code)
        override_config(config, config_overrides or {})
        refuse_unsupported(config, path)
        sees = reads_images(config)
        loaded: Any = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation={"text_config": NAME} if sees else NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,  # makes it return a pair, which its annotation does not know
            ignore_mismatched_sizes=True,  # they are reported below, like missing ones
        )
        model, report = loaded
    except (OSError, ValueError, SafetensorError) as error:
        what = f"no model could be loaded from {path}: {first_line(error)}"
        raise ModelError(Problem(what, fix=without_git_lfs(path), field="model.path")) from error
    # transformers would go on with random numbers in the place of these
    if missing := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            Problem(
                f"the model at {path} has no weights of the right shape for {', '.join(missing[:3])}{more}",
                fix="use the complete folder of a causal language model",
                field="model.path",
            )
        )
    if not model._supports_attention_backend:
        raise ModelError(
            Problem(
                f"{type(model).__name__} at {path} does not use transformers' attention interface",
                fix="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM model",
                field="model.path",
            )
        )
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers hides the method's type behind a wrapper
    return model.eval()


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that loads a model of this configuration with its language-model head."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a response: the generation config's, the model config's and the tokenizer's, together."""
    ids: set[int] = set()
    text_config = model.config.get_text_config()
    for found in (
        model.generation_config.eos_token_id,
        getattr(text_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if found is not None:
            ids.update(found if isinstance(found, list) else [found])
    return frozenset(ids)


def positions_of(model: PretrainedConfig) -> float:
    """How many positions a model (its text config) was made for, prompt and response together."""
    positions = getattr(model, "max_position_embeddings", None)
    scaled = getattr(model, "rope_parameters", None) or {}
    if positions is None or scaled.get("rope_type", "default") != "default":
        return float("inf")  # scaled rotary embeddings reach further, each kind by a rule of its own
    return float(positions)


def expanded(path: str) -> str:
    """``~`` in front of a folder means the user's home; hub ids stay as they are."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def refuse_unsupported(whole: PretrainedConfig, path: str, *, field: str = "model.path") -> None:
    """Architectures whose attention does more than ours: better no run than a wrong one."""
    config = whole.get_text_config()
    found = None
    if getattr(config, "attn_logit_softcapping", None):
        found = "soft-capped attention logits"
    elif getattr(config, "model_type", "") == "gpt_oss":
        found = "attention sinks"
    elif getattr(config, "kv_lora_rank", None):
        found = "multi-head latent attention"
    elif getattr(config, "use_bidirectional_attention", None):
        found = "attention that looks ahead"
    elif set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}:
        found = "attention layers that are neither full nor sliding-window"
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if has_vision(whole) and not reads_images(whole) and type(whole) not in known:
        what = f"{whole.model_type} at {path} is a vision-language model of a family that is not supported"
        raise ModelError(Problem(what, fix=CHOOSE, field=field))
    if found:
        raise ModelError(
            Problem(
                f"{getattr(config, 'model_type', 'this model')} at {path} uses {found}, which is not supported",
                fix="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM model",
                field=field,
            )
        )


def _no_tokenizer(path: str, reason: str, field: str) -> Problem:
    fix = "a folder needs tokenizer.json and tokenizer_config.json; or set model.tokenizer_path"
    return Problem(f"no tokenizer could be loaded from {path}: {reason}", fix=fix, field=field)


def first_line(error: Exception) -> str:
    """What an error says, in a line; with the next one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
