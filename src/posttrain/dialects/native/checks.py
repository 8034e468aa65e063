"""Rules between keys, and names that must be known. Nothing here looks at a file or imports what it names."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.errors import Problem
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, REWARDS, ROLLOUT_ENGINES, TRACKERS, TRAIN_ENGINES


def check(config: RunConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    return [*_names(config), *_rules(config)]


def _names(config: RunConfig) -> Iterator[Problem]:
    chosen = [
        (ADVANTAGES, config.advantage.name, "advantage.name"),
        (POLICY_LOSSES, config.loss.name, "loss.name"),
        (TRAIN_ENGINES, config.policy.engine, "policy.engine"),
        (ROLLOUT_ENGINES, config.rollout.engine, "rollout.engine"),
    ]
    for index, term in enumerate(config.reward.terms):
        if term.path is None:  # otherwise the name is a function in the user's file
            chosen.append((REWARDS, term.name, f"reward.terms.{index}.name"))
    for index, name in enumerate(config.tracking.trackers):
        chosen.append((TRACKERS, name, f"tracking.trackers.{index}"))
    for registry, name, field in chosen:
        if name not in registry.names():
            yield registry.problem(name, field)


def _rules(config: RunConfig) -> Iterator[Problem]:
    if not config.data.train_files:
        yield Problem("there is no training file", fix="write data.train_files: [FILE, ...]", field="data.train_files")
    if config.rollout.temperature == 0:
        yield Problem(
            "temperature 0 samples the same response every time, so there is nothing to learn from",
            fix="use a temperature above 0, such as rollout.temperature=1.0",
            field="rollout.temperature",
        )
    if config.advantage.name == "grpo" and config.rollout.samples_per_prompt == 1:
        yield Problem(
            "GRPO compares the samples of a prompt, and with 1 sample per prompt every advantage is 0",
            fix="use at least 2, such as rollout.samples_per_prompt=8",
            field="rollout.samples_per_prompt",
        )
    if config.placement.devices > 1:
        yield Problem(
            f"a run on {config.placement.devices} devices is not possible yet; this version runs on one",
            fix="use placement.devices=1",
            field="placement.devices",
        )


def warnings_of(config: RunConfig) -> list[str]:
    """What was asked for and has no effect, in sentences."""
    wants_no_validation = not config.data.validation_files
    found = [
        (
            wants_no_validation and config.validation.every_steps is not None,
            "validation.every_steps has no effect: data.validation_files names no file",
        ),
        (
            config.reference.path is not None and config.loss.kl_coef == 0,
            "reference.path has no effect: loss.kl_coef is 0, so no reference model is loaded",
        ),
        (
            config.policy.schedule.warmup_updates is not None and config.policy.schedule.warmup_ratio > 0,
            "policy.schedule.warmup_ratio has no effect: policy.schedule.warmup_updates is given",
        ),
        (
            config.policy.schedule.name == "constant" and config.policy.schedule.min_lr_ratio > 0,
            "policy.schedule.min_lr_ratio has no effect: the schedule is constant",
        ),
    ]
    return [text for applies, text in found if applies]
