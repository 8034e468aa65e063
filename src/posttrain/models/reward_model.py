"""Reward models: classifiers with one label, whose output at the last token of a conversation is its score."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config.model import ModelConfig
from posttrain.config.reward import CLASSIFIERS, RewardModelConfig
from posttrain.errors import ModelError, Problem
from posttrain.libraries.weight_names import score_head_in
from posttrain.models.loading import load_model_config, load_tokenizer
from posttrain.models.value_head import load_value_model

FIELD = "reward.model.path"


def load_reward_model(
    config: RewardModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load the classifier, frozen, with our attention, its body in ``dtype`` and its head in float32.

    In transformers, sequence classification models return one number, at a padding token that they search, and token
    classification models one per token; here the number at the last token is used for both.

    Raises: ModelError when the folder holds no such model, or one with more than one label.
    """
    saved_as = getattr(load_model_config(config.path, config.trust_remote_code, field=FIELD), "architectures", None)
    if not (saved_as and saved_as[0].endswith(CLASSIFIERS)) and score_head_in(config.path) is None:
        what = (
            f"the model at {config.path} is not a classifier ({saved_as[0] if saved_as else 'no architecture named'})"
        )
        fix = "use a sequence or token classification model with one label"
        raise ModelError(Problem(what, fix=fix, field=FIELD))
    model = load_value_model(
        config.path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        config_overrides=config.config_overrides,
        field=FIELD,
    )
    return model.requires_grad_(False)


def load_reward_tokenizer(
    config: RewardModelConfig, policy_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """Return the reward model's own tokenizer when it re-tokenises conversations; None when it reads the policy's token ids.

    Raises: ModelError when it needs a tokenizer or chat template of its own and has none, or reads the policy's ids, which
        mean something else to it.
    """
    try:
        own = load_tokenizer(ModelConfig(path=config.path, trust_remote_code=config.trust_remote_code))
    except ModelError as error:
        fix = "add tokenizer.json and tokenizer_config.json to its folder"
        raise ModelError([replace(problem, field=FIELD, fix=fix) for problem in error.problems]) from error
    if config.own_template:
        if not own.chat_template:
            what = f"the tokenizer of {config.path} has no chat template to render conversations with"
            fix = "add one to its tokenizer_config.json, or set reward.model.own_template=false"
            raise ModelError(Problem(what, fix=fix, field="reward.model.own_template"))
        return own
    if own.get_vocab() != policy_tokenizer.get_vocab():
        raise ModelError(
            Problem(
                f"the reward model at {config.path} has another tokenizer than the policy, and would misread its token ids",
                fix="set reward.model.own_template=true",
                field="reward.model.own_template",
            )
        )
    return None
