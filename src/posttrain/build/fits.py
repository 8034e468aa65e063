"""Check that a model can read the data: it knows every token id, and has positions for the longest sequence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.config import RunConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.generate import GenerateConfig
from posttrain.config.model import ModelConfig
from posttrain.config.sft import SftConfig
from posttrain.errors import ConfigError, ModelError, Problem
from posttrain.models.loading import load_model_config, load_tokenizer, override_config, positions_of
from posttrain.plan.checks.images import sampler_problems
from posttrain.records.prompts import Prompt
from posttrain.records.texts import Text


def check_prompts_fit(config: RunConfig, training: Sequence[Prompt], validation: Sequence[Prompt]) -> float:
    """Check that the policy can read all prompts and has positions for them and their responses. Returns its positions.

    Raises: ConfigError. Rotary embeddings would go on beyond the last position, with a model that never saw one there.
    """
    model = _text_config(config.model)
    problems = _unknown_tokens(_highest_token([*training, *validation]), model, config.model)
    validation_tokens = config.validation.max_response_tokens or config.rollout.max_response_tokens
    validation_field = f"{'validation' if config.validation.max_response_tokens else 'rollout'}.max_response_tokens"
    problems += _too_long("training ", training, config.rollout.max_response_tokens, model)
    problems += _too_long("validation ", validation, validation_tokens, model, field=validation_field)
    if problems:
        raise ConfigError(problems)
    return positions_of(model)


def check_critic_fits(config: RunConfig, tokenizer: PreTrainedTokenizerBase, training: Sequence[Prompt]) -> None:
    """Check that a critic that starts from another model than the policy can read what the policy reads and writes.

    Raises: ConfigError. With other token ids it would read another text, and nothing else would show it.
    """
    path = config.critic.path
    if path is None:
        return
    model = load_model_config(path, config.model.trust_remote_code, field="critic.path").get_text_config()
    fix = "use a critic of the policy's family"
    problems = []
    if len(tokenizer) > model.vocab_size:
        what = f"the policy's tokenizer has {len(tokenizer)} tokens, and the critic knows {model.vocab_size}"
        problems.append(Problem(what, fix=fix, field="critic.path"))
    with suppress(ModelError):  # a folder without a tokenizer says nothing about its token ids
        own = load_tokenizer(ModelConfig(path=path, trust_remote_code=config.model.trust_remote_code)).get_vocab()
        other = [token for token, index in tokenizer.get_vocab().items() if own.get(token, index) != index]
        if other:
            what = f"the critic's token ids are not the policy's: {len(other)} tokens differ, such as {min(other)!r}"
            problems.append(Problem(what, fix=fix, field="critic.path"))
    longest = max(len(prompt.token_ids) for prompt in training) + config.rollout.max_response_tokens
    if longest > positions_of(model):
        what = (
            f"the longest training prompt and a response make up to {longest} tokens, which do not fit into the "
            f"{positions_of(model):.0f} positions of the critic"
        )
        problems.append(Problem(what, fix="lower rollout.max_response_tokens, or " + fix, field="critic.path"))
    if problems:
        raise ConfigError(problems)


def check_texts_fit(config: SftConfig, texts: Sequence[Text]) -> None:
    """Check that the model knows the tokens of the texts and has positions for them. Raises: ConfigError."""
    model = _text_config(config.model)
    problems = _unknown_tokens(max(int(text.token_ids.max()) for text in texts), model, config.model)
    longest, positions = max(len(text.token_ids) for text in texts), positions_of(model)
    if longest > positions:
        what = f"the longest row ({longest} tokens) does not fit into the {positions:.0f} positions of the model"
        fix = f"use data.max_tokens={positions:.0f} with data.overlong"
        problems.append(Problem(what, fix=fix, field="data.max_tokens"))
    if problems:
        raise ConfigError(problems)


def check_rows_fit(config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    """Check that the model can read the prompts of a generation and has positions for their responses. Raises: ConfigError."""
    model = _text_config(config.model)
    problems = _unknown_tokens(_highest_token(prompts), model, config.model)
    problems += _too_long("", prompts, config.rollout.max_response_tokens, model)
    if any(prompt.images for prompt in prompts):
        problems += sampler_problems(config.rollout)
    if problems:
        raise ConfigError(problems)


def _text_config(config: ModelConfig) -> Any:
    """The configuration of the model's text part, with the overrides of the config."""
    whole = load_model_config(config.path, config.trust_remote_code)
    override_config(whole, overrides_of(config))
    return whole.get_text_config()


def _highest_token(prompts: Sequence[Prompt]) -> int:
    return max((max(prompt.token_ids, default=0) for prompt in prompts), default=0)


def _unknown_tokens(highest: int, model: Any, config: ModelConfig) -> list[Problem]:
    if highest < model.vocab_size:
        return []
    what = f"the tokenizer makes token id {highest}, and the model knows {model.vocab_size} tokens"
    field = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    return [Problem(what, fix="use the model's own tokenizer", field=field)]


def _too_long(
    kind: str, prompts: Sequence[Prompt], tokens: int, model: Any, *, field: str = "rollout.max_response_tokens"
) -> list[Problem]:
    """``kind`` of prompts, with a space behind it; ``tokens`` that a response may have, set by ``field``."""
    positions = positions_of(model)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if longest + tokens <= positions:
        return []
    what = (
        f"the longest {kind}prompt ({longest} tokens) and a response of up to {tokens} do not fit into the "
        f"{positions:.0f} positions of the model"
    )
    return [Problem(what, fix=f"lower {field}, or data.max_prompt_tokens with data.overlong_prompts", field=field)]
