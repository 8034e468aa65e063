"""A critic: a language model with a head that returns one number per token, the value of the text so far."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.utils import logging

from posttrain.config.reward import CLASSIFIERS
from posttrain.errors import ModelError, Problem
from posttrain.libraries.git_lfs import without_git_lfs
from posttrain.libraries.weight_names import OF_A_HEAD, SCORE_HEAD, score_head_in
from posttrain.models.attention import KNOWN, NAME, register_attention
from posttrain.models.experts import multiply_any_width
from posttrain.models.head import states_at
from posttrain.models.loading import (
    expanded,
    first_line,
    load_model_config,
    override_config,
    refuse_unsupported,
    restore_rounded,
)
from posttrain.models.recurrent import has_states, separate_sequences
from posttrain.models.vision import add_features_to_layers, reads_images

HEADS = ("score", "classifier")  # names of the last layer in transformers' token classification models


def load_value_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    field: str = "critic.path",
    of_sequences: bool = False,
) -> PreTrainedModel:
    """Load the model in ``path`` with a value head, our attention, in eval mode (no dropout); its body in ``dtype``.

    A causal language model gets a new head. A token or sequence classification model with one label keeps its own, and so does
    a checkpoint whose head has the name that another library gives it (libraries.weight_names). A sequence classification class
    has no bias in most architectures: a head with one that is not 0 is loaded as the token classification class, which has.

    A new head is initialized with 0. Every value is then 0, a reasonable first guess: advantages start as plain returns instead
    of returns minus random numbers, the run does not depend on a random draw, and the body stays unchanged until the head has
    a direction (the body's gradient is exactly 0 in the first update only).

    The head is float32 in either case and computes in float32: the differences between values that a critic has to resolve are
    smaller than the resolution of bfloat16. The model has transformers' own token classification class, so its checkpoints
    load with ``AutoModelForTokenClassification``. For an architecture without such a class, vision-language models among them,
    one is derived here in the same way; only this function loads its folder.

    Args: field is the setting that named the path, for messages; with of_sequences the model has transformers' sequence
        classification class where that can hold its head: a reward model.
    Raises: ModelError when the folder holds no usable model, lacks weights other than a head, has a head with more than one
        label or of several layers, or has an architecture whose attention cannot be replaced.
    """
    logging.disable_progress_bar()
    register_attention()
    path = expanded(path)
    config = load_model_config(path, trust_remote_code, field=field)
    override_config(config, config_overrides or {}, field=f"{field.rpartition('.')[0]}.config_overrides")
    refuse_unsupported(config, path, field=field)
    restore_rounded(config)
    saved_as = (getattr(config, "architectures", None) or [""])[0]
    config.num_labels = 1
    saved_head = score_head_in(path)
    kind = (sequence_classifier if of_sequences else token_classifier)(config, path, field)
    model, report = _loaded(kind, path, config, dtype, field, saved_head)
    if saved_head is None and (
        saved_head := _head_among(report["unexpected_keys"])
    ):  # of a hub id, or without safetensors
        model, report = _loaded(kind, path, config, dtype, field, saved_head)
    if of_sequences and f"{_name_in(kind)}.bias" in report["unexpected_keys"]:
        biased = token_classifier(config, path, field)
        found = _loaded(biased, path, config, dtype, field, saved_head)
        if value_head(found[0]).bias.any():
            model, report = found
    _refuse_layers(report["unexpected_keys"], path, field)
    head_name = next(name for name in HEADS if hasattr(model, name))
    head: nn.Linear = getattr(model, head_name)
    missing, resized = set(report["missing_keys"]), {name for name, *_ in report["mismatched_keys"]}
    head_weights = {f"{head_name}.{name}" for name, _ in head.named_parameters()}
    if resized & head_weights or (f"{head_name}.weight" in missing and (saved_as.endswith(CLASSIFIERS) or saved_head)):
        what = f"the classification head of the model at {path} does not have exactly one label"
        fix = "use one that was trained with num_labels=1, or a causal language model, which gets a new head"
        raise ModelError(Problem(what, fix=fix, field=field))
    if lacking := sorted((missing | resized) - head_weights):
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        what = f"the model at {path} has no weights of the right shape for {', '.join(lacking[:3])}{more}"
        fix = "use the complete folder of a causal language or token classification model"
        raise ModelError(Problem(what, fix=fix, field=field))
    if not (model._supports_attention_backend or has_states(config)):
        what = f"{type(model).__name__} at {path} does not use transformers' attention interface"
        raise ModelError(Problem(what, fix=KNOWN, field=field))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if f"{head_name}.{name}" in missing:  # filled with random numbers by transformers
                weight.zero_()
    multiply_any_width(model)
    separate_sequences(model, field)
    add_features_to_layers(model)
    cast(Any, model).to(torch.device(device))  # transformers hides the method's type
    head.float()
    return model.eval()


def _loaded(
    kind: type[PreTrainedModel],
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    field: str,
    saved_head: str | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a folder as the class, with the head saved under another name read as its own. Returns: the model, and transformers'
    report of the names that were missing, unexpected or of other shapes."""
    own_head, renamed = _name_in(kind), None
    if saved_head is not None and saved_head != own_head:
        renamed = {f"^{re.escape(saved_head)}[.]": f"{own_head}."}
    try:
        with _quiet():
            found: Any = kind.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation={"text_config": NAME} if reads_images(config) else NAME,
                output_loading_info=True,
                key_mapping=renamed,
                ignore_mismatched_sizes=True,  # reported by the caller, like missing ones
            )
    except (OSError, ImportError, ValueError, SafetensorError) as error:
        what = f"no model could be loaded from {path}: {first_line(error)}"
        raise ModelError(Problem(what, fix=without_git_lfs(path), field=field)) from error
    model, report = found
    if renamed:
        # transformers would undo it where it saves the model; written checkpoints have the class's own name
        model._weight_conversions = [
            each for each in model._weight_conversions if own_head not in str(each.target_patterns)
        ]
    return model, report


def _head_among(names: Iterable[str]) -> str | None:
    """Return the name of the score head among the names of weights; None without."""
    return next((match[1] for match in map(SCORE_HEAD.match, sorted(names)) if match), None)


def _refuse_layers(unread: Iterable[str], path: str, field: str) -> None:
    """Raises: ModelError when weights of a head are among those that no part of the model reads."""
    left = sorted(name for name in unread if OF_A_HEAD.match(name) and not name.endswith(".bias"))
    if left:
        what = f"the head of the model at {path} is not one linear layer to one number: it has {', '.join(left[:4])}"
        fix = "use a model whose head is one layer, or the language model that it was made from, which gets a new head"
        raise ModelError(Problem(what, fix=fix, field=field))


def _name_in(kind: type[PreTrainedModel]) -> str:
    """Return the head's name in transformers' classes: those built from its generic parts share one."""
    generic = issubclass(kind, (GenericForSequenceClassification, GenericForTokenClassification))
    return HEADS[0] if generic else HEADS[1]


def write_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's padding token, or its end token, into a sequence classifier's configuration where it has none:
    transformers looks for it to find the last token of a row."""
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def token_values(model: PreTrainedModel, positions: Tensor, **inputs: Any) -> Tensor:
    """Compute values at the given positions of one packed row, [M] float32, carrying gradient.

    Args: a model of ``load_value_model``; positions [M] int64; inputs: arguments of its body.
    """
    hidden = states_at(model.base_model(**inputs).last_hidden_state[0], positions)
    head = value_head(model)
    # No view, of which FSDP warns
    return linear(hidden.float(), head.weight, head.bias)[:, 0].clone()


def value_head(model: PreTrainedModel) -> nn.Linear:
    """Return the last layer of a model of ``load_value_model``: from the hidden size to one number."""
    head: nn.Linear = getattr(model, head_name(model))
    return head


def head_name(model: PreTrainedModel) -> str:
    """Return the model's name of that layer."""
    return next(name for name in HEADS if hasattr(model, name))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warning about a new head, which is intended here; problems are reported by this module."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def token_classifier(config: PretrainedConfig, path: str, field: str) -> type[PreTrainedModel]:
    """Return transformers' token classification class of an architecture, or one built from the causal model's parts."""
    known: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None:
        return cast("type[PreTrainedModel]", known)
    return _derived(config, path, field, "TokenClassification", GenericForTokenClassification)


def sequence_classifier(config: PretrainedConfig, path: str, field: str) -> type[PreTrainedModel]:
    """Return transformers' sequence classification class of an architecture, or one built from the causal model's parts."""
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None:
        return cast("type[PreTrainedModel]", known)
    return _derived(config, path, field, "SequenceClassification", GenericForSequenceClassification)


def is_derived(model: PreTrainedModel) -> bool:
    """Return True for a model whose class transformers lacks, so that none of its auto classes loads a folder of it."""
    return any(kind.__module__ == __name__ for kind in type(model).__mro__)


def _derived(config: PretrainedConfig, path: str, field: str, kind: str, generic: type) -> type[PreTrainedModel]:
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    causal: Any = known.get(type(config), None)
    if causal is None:
        what = f"{config.model_type} at {path} is not a causal language model that transformers knows"
        raise ModelError(Problem(what, fix=KNOWN, field=field))
    family = next(parent for parent in causal.__mro__ if PreTrainedModel in parent.__bases__)
    name = re.sub("For(CausalLM|ConditionalGeneration)$", f"For{kind}", causal.__name__)
    if (renamed := get_checkpoint_conversion_mapping(causal.__name__)) is not None:
        # Names of weights on disk are registered by the class's name.
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (generic, family), {"__module__": __name__})
