"""Rules between the process reward model and the other keys of a run."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.process_reward import PROCESS_REWARD
from posttrain.errors import Problem

_AT = PROCESS_REWARD


def process_reward_problems(config: RunConfig) -> Iterator[Problem]:
    """Report runs in which the process reward model cannot be trained, or is not there."""
    reads = "process_rewards" in config.advantage.about.inputs
    if config.reward.process is None:
        if reads:
            yield Problem(
                f"{config.advantage.name} reads rewards of tokens from a process reward model, and there is none",
                fix=f"add one, such as {_AT}.log_ratio_scale=0.05, or use advantage.name=rloo",
                field="advantage.name",
            )
        return
    if not reads:
        yield Problem(
            f"{config.advantage.name} does not read the rewards of the process reward model",
            fix=f"use advantage.name=prime, or remove {_AT}",
            field="advantage.name",
        )
    if config.rollout.samples_per_prompt < 2:
        yield Problem(
            "prime compares the responses to a prompt, and there is 1",
            fix="use rollout.samples_per_prompt=4, or another number above 1",
            field="rollout.samples_per_prompt",
        )
    if config.environment.used:
        yield Problem(
            "the process reward model learns from responses of one turn, and this run plays episodes",
            fix="leave out the environment, or use advantage.name=rloo without a process reward model",
            field=_AT,
        )
    if config.asynchronous.is_on:
        yield Problem(
            "the process reward model is trained in synchronous steps",
            fix="use asynchronous.mode=off",
            field="asynchronous.mode",
        )
    for name in ("weights", "fit"):
        if getattr(config.resampling, name) != "none":
            yield Problem(
                f"the process reward model learns from all responses of a step, and resampling.{name} draws among them",
                fix=f"use resampling.{name}=none",
                field=f"resampling.{name}",
            )
