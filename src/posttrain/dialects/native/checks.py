"""Rules between keys, and names that must be known. Nothing here looks at a file or imports what it names."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.algorithm import AdvantageConfig, LossConfig
from posttrain.errors import Problem
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, REWARDS, ROLLOUT_ENGINES, TRACKERS, TRAIN_ENGINES, Registry

# Advantage estimators that exist but need something this version's loop does not compute yet.
NOT_YET_SUPPLIED = {
    "gae": "the values of a critic",
    "gdpo": "the terms of the reward one by one",
    "optimal_token_baseline": "the sum of squared probabilities at every token",
    "remax": "the reward of a greedy response to every prompt",
    "tir_optimal_token_baseline": "the sum of squared probabilities at every token",
}
CHOOSE_IN_THE_MINI_BATCH = ("clip_cov", "kl_cov")  # losses that need all tokens of a mini-batch at once
SEQUENCE_MEAN_LOSSES = ("geo_mean", "gspo", "sapo")  # losses defined as a mean over responses


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
    yield from _algorithm_rules(config)
    if config.placement.devices > 1:
        yield Problem(
            f"a run on {config.placement.devices} devices is not possible yet; this version runs on one",
            fix="use placement.devices=1",
            field="placement.devices",
        )


def _algorithm_rules(config: RunConfig) -> Iterator[Problem]:
    advantage, loss = config.advantage, config.loss
    if advantage.name in NOT_YET_SUPPLIED:
        yield Problem(
            f"{advantage.name} needs {NOT_YET_SUPPLIED[advantage.name]}, which this version does not compute yet",
            fix="choose another estimator, such as advantage.name=grpo",
            field="advantage.name",
        )
    known = advantage.name in ADVANTAGES.names()
    compares = known and {"lone_sample_keeps_reward", "normalize_by_std"} & set(ADVANTAGES.settings(advantage.name))
    if compares and config.rollout.samples_per_prompt == 1 and not advantage.lone_sample_keeps_reward:
        yield Problem(
            f"{advantage.name} compares the samples of a prompt, and with 1 sample per prompt every advantage is 0",
            fix="use at least 2, such as rollout.samples_per_prompt=8",
            field="rollout.samples_per_prompt",
        )
    if loss.name == "dro" and loss.dro_beta is None:
        yield Problem("dro needs loss.dro_beta", fix="give it, such as loss.dro_beta=0.05", field="loss.dro_beta")
    mini_batch = config.policy.sequences_per_mini_batch
    if mini_batch is None:
        mini_batch = config.data.prompts_per_step * config.rollout.samples_per_prompt
    if loss.name in CHOOSE_IN_THE_MINI_BATCH and config.policy.sequences_per_micro_batch_per_device < mini_batch:
        yield Problem(
            f"{loss.name} chooses tokens among those of a whole mini-batch, which is {mini_batch} sequences; micro-batches "
            f"of {config.policy.sequences_per_micro_batch_per_device} would each choose for themselves",
            fix=f"use policy.sequences_per_micro_batch_per_device={mini_batch}, or smaller mini-batches",
            field="policy.sequences_per_micro_batch_per_device",
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
        (
            config.loss.kl_estimator != "k3" and config.loss.kl_coef == 0,
            "loss.kl_estimator has no effect: loss.kl_coef is 0",
        ),
        (
            config.loss.name in SEQUENCE_MEAN_LOSSES and config.loss.aggregation != "sequence_mean_token_mean",
            f"{config.loss.name} is defined with loss.aggregation=sequence_mean_token_mean; this run uses "
            f"{config.loss.aggregation}",
        ),
    ]
    return [
        *(text for applies, text in found if applies),
        *_unread("advantage", config.advantage, ADVANTAGES),
        *_unread("loss", config.loss, POLICY_LOSSES),
    ]


def _unread(section: str, chosen: AdvantageConfig | LossConfig, registry: Registry) -> Iterator[str]:
    """What was changed in a section and is read by other choices of its name only."""
    fields = {name: registry.settings(name) for name in registry.names()}
    if chosen.name not in fields:
        return
    read_by_some = {field for each in fields.values() for field in each}
    for field in type(chosen).model_fields:
        changed = getattr(chosen, field) != type(chosen).model_fields[field].default
        if field in read_by_some and field not in fields[chosen.name] and changed:
            readers = ", ".join(reader for reader in sorted(fields) if field in fields[reader])
            yield f"{section}.{field} has no effect: {chosen.name} does not use it ({readers} would)"
