"""Rules between keys of a training run."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.algorithm import AlgorithmSection
from posttrain.config.base import Section
from posttrain.config.checks.algorithm import algorithm_problems, algorithm_warnings
from posttrain.config.checks.asynchronous import (
    asynchronous_problems,
    asynchronous_warnings,
)
from posttrain.config.checks.batches import batch_problems, batch_warnings
from posttrain.config.checks.domains import domain_problems, domain_warnings
from posttrain.config.checks.environment import environment_problems, environment_warnings
from posttrain.config.checks.own_classes import own_class_problems, own_class_warnings
from posttrain.config.checks.process_reward import process_reward_problems
from posttrain.config.checks.profiling import profiling_warnings
from posttrain.config.checks.rewards import reward_problems, reward_warnings
from posttrain.config.checks.rollout import missing_sampler, training_sampler_warnings
from posttrain.config.checks.run import (
    naming_problems,
    resuming_problems,
    retention_warnings,
    saving_warnings,
    within_epochs_warnings,
)
from posttrain.config.checks.tracking import tracking_problems, tracking_warnings
from posttrain.config.checks.training import missing_kernels, training_problems, training_warnings
from posttrain.config.critic import CriticConfig
from posttrain.config.roles import needs_values
from posttrain.errors import Problem
from posttrain.plan.checks.cluster import cluster_problems, cluster_warnings, unsupported_cluster
from posttrain.plan.checks.distillation import distillation_problems, distillation_warnings
from posttrain.plan.checks.engines import (
    engine_problems,
    engine_warnings,
    process_engine_problems,
    quantized_problems,
    reference_problems,
    reference_warnings,
    router_problems,
    router_warnings,
    scoring_problems,
    sharded_saving_problems,
)
from posttrain.plan.checks.images import picture_problems, unread_pictures
from posttrain.plan.checks.libraries import missing_libraries
from posttrain.plan.checks.names import name_problems
from posttrain.plan.sampler_copies import copy_warnings
from posttrain.registry import ADVANTAGES


def check(config: RunConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    return [*name_problems(config), *_rules(config)]


def unsupported(config: RunConfig) -> list[Problem]:
    """Report valid settings that are planned but not built yet: a plan accepts them, a run rejects them."""
    return [
        *unsupported_cluster(config),
        *unread_pictures(config),
        *missing_sampler(config.rollout),
        *missing_kernels(config.model),
        *missing_libraries(config),
    ]


def _rules(config: RunConfig) -> Iterator[Problem]:
    reads = config.data.dataset_class_file is None  # a class of one's own may make its rows up
    if (
        reads
        and not config.data.train_files
        and config.environment.train_episodes is None
        and not config.validation.only
    ):
        fix = "write data.train_files: [FILE, ...]; environments without data have environment.train_episodes"
        yield Problem("there is no training file", fix=fix, field="data.train_files")
    if config.rollout.temperature == 0:
        yield Problem(
            "temperature 0 samples the same response every time, so there is nothing to learn from",
            fix="use a temperature above 0, such as rollout.temperature=1.0",
            field="rollout.temperature",
        )
    if config.validation.only and not config.data.validation_files and config.environment.validation_episodes is None:
        what = "the run only validates, and there is no validation file"
        yield Problem(what, fix="write data.validation_files: [FILE, ...]", field="validation.only")
    yield from naming_problems(config)
    yield from resuming_problems(config)
    yield from sharded_saving_problems(config)
    yield from quantized_problems(config)
    yield from _algorithm_rules(config)
    yield from algorithm_problems(config)
    yield from process_reward_problems(config)
    yield from batch_problems(config)
    yield from domain_problems(config)
    yield from own_class_problems(config)
    yield from asynchronous_problems(config)
    yield from cluster_problems(config)
    yield from environment_problems(config)
    yield from picture_problems(config)
    yield from engine_problems(config)
    yield from process_engine_problems(config)
    yield from reference_problems(config)
    yield from distillation_problems(config)
    yield from router_problems(config)
    yield from scoring_problems(config)
    yield from training_problems(config)
    yield from reward_problems(config)
    yield from tracking_problems(config.tracking)


def _algorithm_rules(config: RunConfig) -> Iterator[Problem]:
    advantage, loss = config.advantage, config.loss
    compares = advantage.about.facts.compares_responses and not config.distillation.alone
    keeps_reward = advantage.settings.get("lone_sample_keeps_reward", False)
    if compares and config.rollout.samples_per_prompt == 1 and not keeps_reward:
        yield Problem(
            f"{advantage.name} compares the samples of a prompt, and with 1 sample per prompt every advantage is 0",
            fix="use at least 2, such as rollout.samples_per_prompt=8",
            field="rollout.samples_per_prompt",
        )
    for section, chosen in (("advantage", advantage), ("loss", loss)):
        for name, setting in chosen.about.settings.items():
            if setting.required and name not in chosen.settings:
                field = f"{section}.{name}"
                meaning = f" ({setting.meaning.rstrip('.')})" if setting.meaning else ""
                fix = f"give it, such as {field}={setting.example()}{meaning}"
                yield Problem(f"{chosen.name} needs {field}", fix=fix, field=field)


def warnings_of(config: RunConfig) -> list[str]:
    """Report settings that have no effect, in sentences."""
    wants_no_validation = not config.data.validation_files and config.environment.validation_episodes is None
    uses_critic = needs_values(config)
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
            config.loss.kl_aggregation is not None and config.loss.kl_coef == 0,
            "loss.kl_aggregation has no effect: loss.kl_coef is 0",
        ),
        (
            config.loss.kl_importance_weighted and config.loss.kl_coef == 0,
            "loss.kl_importance_weighted has no effect: loss.kl_coef is 0",
        ),
        (
            config.loss.about.facts.aggregation not in ("", config.loss.aggregation),
            f"{config.loss.name} is defined with loss.aggregation="
            f"{config.loss.about.facts.aggregation}; this run uses "
            f"{config.loss.aggregation}",
        ),
    ]
    return [
        *(text for applies, text in found if applies),
        *retention_warnings(config.checkpoint),
        *within_epochs_warnings(config.run),
        *saving_warnings(config),
        *cluster_warnings(config.placement),
        *copy_warnings(config),
        *algorithm_warnings(config),
        *reference_warnings(config),
        *router_warnings(config),
        *distillation_warnings(config),
        *batch_warnings(config),
        *domain_warnings(config),
        *own_class_warnings(config),
        *asynchronous_warnings(config),
        *training_sampler_warnings(config),
        *environment_warnings(config),
        *engine_warnings(config),
        *training_warnings(config, uses_critic=uses_critic),
        *reward_warnings(config),
        *([] if uses_critic else _without_a_critic(config)),
        *tracking_warnings(config.tracking),
        *profiling_warnings(config),
        *_unread("advantage", config.advantage),
        *_unread("loss", config.loss),
    ]


def _without_a_critic(config: RunConfig) -> Iterator[str]:
    """Report settings of the critic in a run without one."""
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


def _unread(section: str, chosen: AlgorithmSection) -> Iterator[str]:
    """Settings that were changed and that only other names of the section read."""
    for name in chosen.unread:
        readers = ", ".join(each for each in chosen.registry.names() if name in chosen.registry.settings(each))
        if readers and chosen.is_known:
            yield f"{section}.{name} has no effect: {chosen.name} does not use it ({readers} would)"
