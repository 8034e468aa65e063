"""Scoring inside a worker process: the factory that ``processes`` loads there, and the values sent in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from posttrain.config.reward import RewardConfig
from posttrain.config.reward_placement import runs_code
from posttrain.libraries import math_verify, reasoning_gym
from posttrain.processes.worker import load
from posttrain.records.prompts import Prompt, patches_of_images
from posttrain.records.trajectories import Invalid
from posttrain.rewards.load import load_rewards
from posttrain.rewards.score import LARGEST, ResponseText, RewardTerms, SentAnswer, TermAnswer, TermValue
from posttrain.sandbox import boxes

_PROMPT_FIELDS = [field.name for field in fields(Prompt) if field.name not in ("images", "image_patches")]
FACTORY = "posttrain.rewards.in_worker:make"

# Libraries that take seconds to import: loaded once, before the first call of a worker.
_PRELOAD = {
    "math_verify": math_verify.preload,
    "math_rule": math_verify.preload,
    "reasoning_gym": reasoning_gym.preload,
}


def make(setup: Mapping[str, Any]) -> Scoring:
    """Build the handler of calls from {"reward": plain values of a ``RewardConfig``, "tokenizer": a factory and its argument, or
    None}. Raises: ConfigError."""
    config = RewardConfig.model_validate(setup["reward"])
    tokenizer = None if setup["tokenizer"] is None else partial(load, *setup["tokenizer"])
    scoring = Scoring(load_rewards(config, tokenizer=tokenizer), runs_code=runs_code(config))
    for term in config.terms:
        if term.path is None and term.name in _PRELOAD:
            _PRELOAD[term.name]()
    return scoring


class Scoring:
    """Handler of {"prompt", "response", "sequence", "plain_answer"}, and of {"term", "prompts", "responses"}: a
    batched term."""

    def __init__(self, terms: RewardTerms, *, runs_code: bool):
        self._terms = terms
        self._runs_code = runs_code

    def after_fork(self) -> None:
        """Start the process that supervises sandboxes before the first call, so that it outlives calls."""
        if self._runs_code:
            boxes.prepare()

    def __call__(self, call: Mapping[str, Any]) -> list[Any] | dict[str, Any] | float:
        if "term" in call:
            prompts = [prompt_of(prompt) for prompt in call["prompts"]]
            said = self._terms.call_batched(call["term"], prompts, call["responses"])
            return plain(said) if isinstance(said, Invalid) else [plain(answer) for answer in said]
        text = ResponseText(call["response"], call["sequence"])
        answers = self._terms.call(prompt_of(call["prompt"]), text, plain_answer=call["plain_answer"])
        return [[index, plain(answer)] for index, answer in answers.items()]


def plain_prompt(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as plain values, with the sizes of its images: no reward reads more of them, and they would be sent with
    every response."""
    values = {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    if prompt.images is not None or prompt.image_patches:
        values["image_patches"] = patches_of_images(prompt)
    return values


def prompt_of(values: Mapping[str, Any]) -> Prompt:
    return Prompt(**values)


def plain(answer: TermAnswer) -> dict[str, Any] | float:
    if isinstance(answer, Invalid):
        return {"reason": answer.reason, "detail": answer.detail}
    if not answer.extras and not answer.texts:
        return answer.value
    beside = {"extras": [list(extra) for extra in answer.extras], "texts": [list(text) for text in answer.texts]}
    return {"value": answer.value, **beside}


def answer_of(values: Any) -> SentAnswer:
    """Rebuild the answer that ``plain`` serialized. Raises: KeyError, TypeError, ValueError for anything else."""
    if isinstance(values, (int, float)):
        return _finite(values)
    if "reason" in values:
        return Invalid(str(values["reason"]), str(values["detail"]))
    return TermValue(
        _finite(values["value"]),
        tuple((str(key), _finite(value)) for key, value in values["extras"]),
        tuple((str(key), str(text)) for key, text in values["texts"]),
    )


def _finite(value: Any) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError("no finite number")
    return float(value)
