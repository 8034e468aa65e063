"""Checks of roles that megatron trains: what it can do, with which model, and what has no effect with it."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.roles import learner_of, starts_from
from posttrain.errors import Problem
from posttrain.plan.engine import Learner, Learners, engine_that
from posttrain.plan.engines.megatron.experts import EXPERTS_OVER, ONE_EXPERT_OVER
from posttrain.plan.engines.megatron.models import (
    has_no_experts,
    model_problems,
    options_without_experts,
)
from posttrain.plan.engines.megatron.options import DISTRIBUTED, megatron_settings, virtual_options

_ACTIVATIONS = "megatron keeps activations on the device, or recomputes them"


def problems(config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
    """Yield what megatron cannot do."""
    for role, section in learners:
        settings, found, _ = megatron_settings(section.engine_options, role=role)
        yield from found
        yield from model_problems(
            starts_from(config, role),
            role=role,
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            settings=settings,
        )
        if section.lora is not None and section.lora.dropout:
            field = f"{role}.lora.dropout"
            what = f"{field} is {section.lora.dropout:g}, and megatron's ranks would not drop out the same numbers"
            other = engine_that(lambda plan: plan.shares_out and plan.drops_out_adapters)
            yield Problem(what, fix=f"use {field}=0, or {role}.engine={other}", field=field)
    if "policy" not in dict(learners) or not isinstance(config, RunConfig):
        return
    loss, reward = config.loss, config.reward.kl
    for field, used in (
        ("loss.kl_estimator", loss.kl_coef and loss.kl_estimator == "full"),
        ("reward.kl.estimator", reward.coef and reward.estimator == "full"),
    ):
        if used:
            what = f"{field}=full compares whole vocabularies, which megatron's ranks have parts of"
            other = engine_that(lambda plan: plan.shares_out and plan.has_full_logits)
            yield Problem(what, fix=f"use {field}=k3, or policy.engine={other}", field=field)


def unsupported(config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
    """Yield what can be planned and not run."""
    if len(learners) > 1:
        yield from _unlike(config)


def _unlike(config: TrainingConfig) -> Iterator[Problem]:
    """Yield sizes that differ: megatron-core's groups exist once in a process, so models on one device are split alike."""
    policy, critic = learner_of(config, "policy"), learner_of(config, "critic")
    everywhere = list(range(config.placement.devices))
    if sorted(policy.devices or everywhere) != sorted(critic.devices or everywhere):
        return
    for name in ("tensor_parallel", "pipeline_parallel", "sequence_parallel"):
        theirs, its = getattr(policy, name), getattr(critic, name)
        if theirs != its:
            what = (
                f"policy.{name} is {theirs} and critic.{name} is {its} on the same devices; this version cannot run it"
            )
            fix = f"use critic.{name}={theirs}, or give policy.devices and critic.devices"
            yield Problem(what, fix=fix, field=f"critic.{name}")
    if has_no_experts(starts_from(config, "critic")):
        return
    theirs, its = (megatron_settings(each.engine_options).settings.experts for each in (policy, critic))
    for name, wanted, found in (
        (EXPERTS_OVER, theirs.parallel, its.parallel),
        (ONE_EXPERT_OVER, theirs.tensor, its.tensor),
    ):
        if wanted != found:
            field = f"critic.engine_options.{name}"
            what = f"policy.engine_options.{name} is {wanted} and {field} is {found} on the same devices"
            fix = "use the same, or give policy.devices and critic.devices"
            yield Problem(f"{what}; this version cannot run it", fix=fix, field=field)


def _held_once(config: TrainingConfig, section: Learner) -> bool:
    """Tell whether the optimizer is distributed although no two devices hold the same weights."""
    settings, tensor = megatron_settings(section.engine_options).settings, section.tensor_parallel
    devices = config.placement.devices if section.devices is None else len(section.devices)
    over, one_over = settings.experts.split(tensor)
    return settings.distributed_optimizer and devices <= section.pipeline_parallel * min(tensor, over * one_over)


def warnings(config: TrainingConfig, learners: Learners) -> Iterator[str]:
    """Yield which settings have no effect with megatron."""
    for role, section in learners:
        yield from options_without_experts(section.engine_options, starts_from(config, role), role=role)
        if _held_once(config, section):
            yield f"{role}.engine_options.{DISTRIBUTED} has no effect: every weight is held once"
        if section.pipeline_parallel == 1:
            for where in virtual_options(section.engine_options, role=role):
                yield f"{where} has no effect: {role}.pipeline_parallel is 1, so there are no stages"
        if isinstance(section, CriticConfig) and section.activation_offload:
            yield f"critic.activation_offload has no effect: {_ACTIVATIONS}"
    if "policy" not in dict(learners):
        return
    for name, why in (
        ("liger", "megatron-core's layers are computed instead of the model's own"),
        ("compile", "megatron-core's layers are computed instead of the model's own"),
        ("activation_offload", _ACTIVATIONS),
    ):
        if getattr(config.model, name):
            yield f"model.{name} has no effect: {why}"
    if isinstance(config, RunConfig) and (config.loss.kl_coef or config.reward.kl.coef):
        if config.reference.offload:
            yield "reference.offload has no effect: with megatron the reference's parts stay on their devices"
        for name in config.reference.engine_options:
            yield f"reference.engine_options.{name} has no effect: the reference is split as the policy is"
