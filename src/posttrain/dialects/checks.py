"""Rules between keys, and names that must be known. Nothing here looks at a file or imports what it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.algorithm import AdvantageConfig, LossConfig
from posttrain.config.base import Section
from posttrain.config.checks.batches import batch_problems, batch_warnings
from posttrain.config.checks.environment import environment_problems, environment_warnings
from posttrain.config.checks.profiling import profiling_warnings
from posttrain.config.checks.rollout import missing_sampler, training_sampler_warnings
from posttrain.config.checks.run import naming_problems, resuming_problems, retention_warnings, saving_warnings
from posttrain.config.checks.tracking import tracking_problems, tracking_warnings
from posttrain.config.checks.training import training_problems, training_warnings
from posttrain.config.critic import CriticConfig
from posttrain.config.roles import needs_values
from posttrain.dialects.algorithm_checks import algorithm_problems, algorithm_warnings
from posttrain.dialects.reward_checks import reward_problems, reward_warnings
from posttrain.errors import Problem
from posttrain.plan.checks.cluster import cluster_problems, cluster_warnings, unbuilt_cluster
from posttrain.plan.checks.engines import engine_problems, engine_warnings, sharded_saving_problems
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, REWARDS, ROLLOUT_ENGINES, TRACKERS, TRAIN_ENGINES, Registry


def check(config: RunConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    return [*_names(config), *_rules(config)]


def unbuilt(config: RunConfig) -> list[Problem]:
    """What is right to ask for and planned, and this version cannot run. A plan can be made of it; a run is refused."""
    return [*unbuilt_cluster(config), *missing_sampler(config.rollout)]


def _names(config: RunConfig) -> Iterator[Problem]:
    chosen: list[tuple[Registry[Any], str, str]] = [
        (ADVANTAGES, config.advantage.name, "advantage.name"),
        (POLICY_LOSSES, config.loss.name, "loss.name"),
        (TRAIN_ENGINES, config.policy.engine, "policy.engine"),
        (TRAIN_ENGINES, config.critic.engine, "critic.engine"),
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
    if not config.data.train_files and config.environment.train_episodes is None:
        yield Problem("there is no training file", fix="write data.train_files: [FILE, ...]", field="data.train_files")
    if config.rollout.temperature == 0:
        yield Problem(
            "temperature 0 samples the same response every time, so there is nothing to learn from",
            fix="use a temperature above 0, such as rollout.temperature=1.0",
            field="rollout.temperature",
        )
    yield from naming_problems(config)
    yield from resuming_problems(config)
    yield from sharded_saving_problems(config)
    yield from _algorithm_rules(config)
    yield from algorithm_problems(config)
    yield from batch_problems(config)
    yield from cluster_problems(config)
    yield from environment_problems(config)
    yield from engine_problems(config)
    yield from training_problems(config)
    yield from reward_problems(config)
    yield from tracking_problems(config.tracking)


def _algorithm_rules(config: RunConfig) -> Iterator[Problem]:
    advantage, loss = config.advantage, config.loss
    compares = ADVANTAGES.facts(advantage.name).compares_responses
    if compares and config.rollout.samples_per_prompt == 1 and not advantage.lone_sample_keeps_reward:
        yield Problem(
            f"{advantage.name} compares the samples of a prompt, and with 1 sample per prompt every advantage is 0",
            fix="use at least 2, such as rollout.samples_per_prompt=8",
            field="rollout.samples_per_prompt",
        )
    if loss.name == "dro" and loss.dro_beta is None:
        yield Problem("dro needs loss.dro_beta", fix="give it, such as loss.dro_beta=0.05", field="loss.dro_beta")


def warnings_of(config: RunConfig) -> list[str]:
    """What was asked for and has no effect, in sentences."""
    wants_no_validation = not config.data.validation_files and config.environment.validation_episodes is None
    uses_critic = needs_values(config.advantage.name)
    found = [
        (
            wants_no_validation and config.validation.every_steps is not None,
            "validation.every_steps has no effect: data.validation_files names no file",
        ),
        (
            wants_no_validation and config.validation.trainer_logprobs,
            "validation.trainer_logprobs has no effect: data.validation_files names no file",
        ),
        (
            config.reference.path is not None and config.loss.kl_coef == config.reward.kl.coef == 0,
            "reference.path has no effect: loss.kl_coef and reward.kl.coef are 0, so no reference model is loaded",
        ),
        (
            config.loss.kl_estimator != "k3" and config.loss.kl_coef == 0,
            "loss.kl_estimator has no effect: loss.kl_coef is 0",
        ),
        (
            POLICY_LOSSES.facts(config.loss.name).aggregation not in ("", config.loss.aggregation),
            f"{config.loss.name} is defined with loss.aggregation="
            f"{POLICY_LOSSES.facts(config.loss.name).aggregation}; this run uses "
            f"{config.loss.aggregation}",
        ),
    ]
    return [
        *(text for applies, text in found if applies),
        *retention_warnings(config.checkpoint),
        *saving_warnings(config),
        *cluster_warnings(config.placement),
        *algorithm_warnings(config),
        *batch_warnings(config),
        *training_sampler_warnings(config),
        *environment_warnings(config),
        *engine_warnings(config),
        *training_warnings(config, uses_critic=uses_critic),
        *reward_warnings(config),
        *([] if uses_critic else _without_a_critic(config)),
        *tracking_warnings(config.tracking),
        *profiling_warnings(config),
        *_unread("advantage", config.advantage, ADVANTAGES),
        *_unread("loss", config.loss, POLICY_LOSSES),
    ]


def _without_a_critic(config: RunConfig) -> Iterator[str]:
    """What was changed about the critic in a run that has none."""
    changed = [f"critic.{name}" for name in _differences(config.critic, CriticConfig())]
    if changed and config.advantage.name in ADVANTAGES.names():
        users = ", ".join(ADVANTAGES.taking("values"))
        have = "have" if len(changed) > 1 else "has"
        yield f"{', '.join(changed)} {have} no effect: {config.advantage.name} needs no critic ({users} would)"


def _differences(section: Section, default: Section) -> Iterator[str]:
    """Dotted names of the fields in which two sections of one kind differ."""
    for name in type(section).model_fields:
        value, other = getattr(section, name), getattr(default, name)
        if isinstance(value, Section) and isinstance(other, Section):
            yield from (f"{name}.{field}" for field in _differences(value, other))
        elif value != other:
            yield name


def _unread(section: str, chosen: AdvantageConfig | LossConfig, registry: Registry[Any]) -> Iterator[str]:
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
