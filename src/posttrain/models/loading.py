"""Loading of Hugging Face models and tokenizers for training, with actionable errors."""

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
from posttrain.libraries.hub import restored
from posttrain.models.attention import KNOWN, NAME, register_attention
from posttrain.models.experts import multiply_any_width
from posttrain.models.recurrent import KINDS, has_states, separate_sequences
from posttrain.models.rope import KEYS as ROPE_KEYS
from posttrain.models.rope import has_rope, override_rope, rope_for_servers
from posttrain.models.vision import CHOOSE, add_features_to_layers, has_vision, reads_images
from posttrain.user_files import search_launch_folder

# Ways to round stored weights that transformers takes back while it reads them.
RESTORED = ("mxfp4", "fp8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tokenizer(config: ModelConfig, *, field: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with the configured chat template. Args: field, the setting that named it, where it is not
    the policy's.

    Raises: ModelError when there is none, or its template file cannot be read.
    """
    path = expanded(config.tokenizer_path or config.path)
    field = field or ("model.tokenizer_path" if config.tokenizer_path else "model.path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception for unreadable files
        if (Path(path) / "config.json").exists():
            # Reports a problem of the model itself first.
            load_model_config(path, config.trust_remote_code, field=field)
        raise ModelError(_no_tokenizer(path, first_line(error), field)) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # Without tokenizer files, transformers guesses a class from the model and creates an empty tokenizer.
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
    """Return the chat template that older vision models store with their processor, chat_template.json; None without one."""
    # transformers' own flags: a missing file, or an unreachable hub, is no error
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
    """Load a model's configuration; ``field`` is the setting that named it.

    Raises: ModelError when it is missing or of an unknown kind.
    """
    path = expanded(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the values in a file may make its class raise anything
        problem = Problem(f"no model could be loaded from {path}: {first_line(error)}", field=field)
        raise ModelError(problem) from error
    return config


def import_modules(names: Sequence[str]) -> None:
    """Import the user's modules, which may register architectures with transformers.

    Raises: ModelError for a module that cannot be imported.
    """
    if names:
        search_launch_folder()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            what = f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}"
            fix = "install it, or put its folder on PYTHONPATH"
            raise ModelError(Problem(what, fix=fix, field="model.external_modules")) from error


def override_config(
    config: PretrainedConfig, overrides: Mapping[str, Any], *, at: str = "", field: str = "model.config_overrides"
) -> None:
    """Set fields of a model's configuration; a mapping is applied to the nested configuration or mapping of that name. Rotary
    positions have their own rules (models.rope).

    Raises: ModelError for a field that the configuration lacks, and for rotary positions that no model can have.
    """
    for name, value in overrides.items():
        if name in ROPE_KEYS and has_rope(config):
            override_rope(config, name, value, field)
            continue
        if not hasattr(config, name):
            what = f"the configuration of {getattr(config, 'model_type', 'this model')} has no field {at}{name}"
            fix = did_you_mean(name, list(config.to_dict()))
            raise ModelError(Problem(what, fix=fix, field=field))
        old = getattr(config, name)
        if isinstance(value, Mapping) and isinstance(old, PretrainedConfig):
            override_config(old, value, at=f"{at}{name}.", field=field)
        else:
            setattr(config, name, {**old, **value} if isinstance(value, Mapping) and isinstance(old, dict) else value)


def overrides_for_servers(
    path: str, overrides: Mapping[str, Any], trust_remote_code: bool, *, field: str = "model.config_overrides"
) -> dict[str, Any]:
    """Return the overrides for a server that reads ``path`` itself. Rotary positions are whole, under the names that old and new
    versions of transformers know.

    Raises: ModelError as ``override_config``.
    """
    if not any(name in overrides for name in ROPE_KEYS):
        return dict(overrides)
    config = load_model_config(expanded(path), trust_remote_code)
    if not has_rope(config):
        return dict(overrides)
    override_config(config, overrides, field=field)
    others = {name: value for name, value in overrides.items() if name not in ROPE_KEYS}
    text = config.get_text_config()
    if text is config:
        return {**others, **rope_for_servers(config)}
    name = next(name for name in config.sub_configs if getattr(config, name) is text)
    return {**others, name: {**others.get(name, {}), **rope_for_servers(config)}}


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    field: str = "model.path",
) -> PreTrainedModel:
    """Load a causal language model with our attention, in eval mode (no dropout), weights in ``dtype``; or a vision-language
    model with it in its language model, and transformers' own attention in its vision tower. Args: field, the setting that
    named it.

    Raises: ModelError when the folder holds no usable model, lacks some of its weights, or has an architecture whose
        attention cannot be replaced.
    """
    disable_progress_bar()  # one per weight file would overwrite our own display
    register_attention()
    path = expanded(path)
    model: PreTrainedModel
    try:
        config = load_model_config(path, trust_remote_code, field=field)
        override_config(config, config_overrides or {})
        refuse_unsupported(config, path, field=field)
        restore_rounded(config)
        sees = reads_images(config)
        loaded: Any = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation={"text_config": NAME} if sees else NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,  # returns a pair, which its annotation does not show
            ignore_mismatched_sizes=True,  # reported below, like missing ones
        )
        model, report = loaded
    except torch.OutOfMemoryError:
        raise
    except (
        OSError, ImportError, ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, SafetensorError,
    ) as error:  # fmt: skip
        if error.args == (NAME,):
            # Older classes look their attention up in a list of their own.
            what = f"the attention of {config.model_type} at {path} is not transformers' interface"
            raise ModelError(Problem(what, fix=KNOWN, field=field)) from error
        what = f"no model could be loaded from {path}: {first_line(error)}"
        raise ModelError(Problem(what, fix=without_git_lfs(path), field=field)) from error
    # transformers would continue with random values in their place
    if missing := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            Problem(
                f"the model at {path} has no weights of the right shape for {', '.join(missing[:3])}{more}",
                fix="use the complete folder of a causal language model",
                field=field,
            )
        )
    # Classes with layers that keep a state do not claim it, for the sake of those: the first pass shows whether it holds.
    if not (model._supports_attention_backend or has_states(config)):
        raise ModelError(
            Problem(
                f"{type(model).__name__} at {path} does not use transformers' attention interface",
                fix=KNOWN,
                field=field,
            )
        )
    multiply_any_width(model)
    separate_sequences(model, field)
    add_features_to_layers(model)
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers hides the method's type behind a wrapper
    return model.eval()


def restore_rounded(config: PretrainedConfig) -> None:
    """Have weights that are stored rounded restored while they are read, on every device."""
    if rounding := _rounding(config):
        rounding["dequantize"] = True


def _rounding(config: PretrainedConfig) -> dict[str, Any]:
    """Return how the stored weights of a model are rounded, as its config.json says it; {} where they are not."""
    found = getattr(config, "quantization_config", None)
    return found if isinstance(found, dict) else {}


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class that loads a model of this configuration with its language-model head."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the generation config's, the model config's and the tokenizer's, together."""
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
    """Return the number of positions that a model (its text config) supports, prompt and response together."""
    positions = getattr(model, "max_position_embeddings", None)
    scaled = getattr(model, "rope_parameters", None) or {}
    if positions is None or scaled.get("rope_type", "default") != "default":
        return float("inf")  # scaled rotary embeddings extend further, each kind by its own rule
    return float(positions)


def expanded(path: str) -> str:
    """Expand a leading ``~``, and download a snapshot of the hub that this machine's cache lacks; hub ids stay unchanged."""
    return restored(str(Path(path).expanduser()) if path.startswith("~") else path)


def refuse_unsupported(whole: PretrainedConfig, path: str, *, field: str = "model.path") -> None:
    """Raises: ModelError for architectures whose attention computes more than ours, which would give wrong results, and for
    weights that are stored rounded."""
    config = whole.get_text_config()
    rounded = _rounding(whole).get("quant_method")
    if rounded not in (None, *RESTORED):
        what = f"the weights at {path} are stored rounded ({rounded}), and cannot be trained"
        fix = "name the folder of the whole weights; policy.lora.quantize rounds those below an adapter to 4 bits"
        raise ModelError(Problem(what, fix=fix, field=field))
    found = None
    if getattr(config, "index_topk", None):
        found = "attention to tokens that an indexer chooses"
    elif getattr(config, "use_bidirectional_attention", None):
        found = "attention to later tokens"
    elif set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention", *KINDS}:
        found = "attention layers that are neither full nor sliding-window"
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if has_vision(whole) and not reads_images(whole) and type(whole) not in known:
        what = f"{whole.model_type} at {path} is a vision-language model of a family that is not supported"
        raise ModelError(Problem(what, fix=CHOOSE, field=field))
    if found:
        raise ModelError(
            Problem(
                f"{getattr(config, 'model_type', 'this model')} at {path} uses {found}, which is not supported",
                fix=KNOWN,
                field=field,
            )
        )


def _no_tokenizer(path: str, reason: str, field: str) -> Problem:
    fix = "a folder needs tokenizer.json and tokenizer_config.json; or set model.tokenizer_path"
    return Problem(f"no tokenizer could be loaded from {path}: {reason}", fix=fix, field=field)


def first_line(error: Exception) -> str:
    """Return the first line of an error; with the next one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
