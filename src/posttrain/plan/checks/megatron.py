"""Rules for roles that megatron trains: what it can do, with which model, and what has no effect with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import learner_of, starts_from
from posttrain.errors import Problem
from posttrain.plan.experts import EXPERTS_OVER, ONE_EXPERT_OVER
from posttrain.plan.megatron import DISTRIBUTED, megatron_settings, virtual_options
from posttrain.plan.megatron_models import (
    has_no_experts,
    model_problems,
    options_without_experts,
    planned_options,
)
from posttrain.registry import is_installed, missing_library

ENGINE = "megatron"
_ACTIVATIONS = "megatron keeps activations on the device, or recomputes them"
Trained = Sequence[tuple[str, LearnerConfig | CriticConfig]]  # roles that are trained, the policy first


def megatron_problems(config: TrainingConfig, trained: Trained) -> Iterator[Problem]:
    """What cannot be run."""
    ours = [(role, section) for role, section in trained if section.engine == ENGINE]
    for role, section in ours:
        settings, problems, _ = megatron_settings(section.engine_options, role=role)
        yield from problems
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
            yield Problem(what, fix=f"use {field}=0, or {role}.engine=fsdp", field=field)
    if config.policy.engine != ENGINE or not isinstance(config, RunConfig):
        return
    if config.loss.kl_coef and config.loss.kl_estimator == "full":
        what = "loss.kl_estimator=full compares whole vocabularies, which megatron's ranks have parts of"
        yield Problem(what, fix="use loss.kl_estimator=k3, or policy.engine=fsdp", field="loss.kl_estimator")


def _unlike(config: TrainingConfig) -> Iterator[Problem]:
    """megatron-core's groups exist once in a process, so models that share devices are split in the same way."""
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
    theirs, its = (megatron_settings(each.engine_options)[0].experts for each in (policy, critic))
    for name, wanted, found in (
        (EXPERTS_OVER, theirs.parallel, its.parallel),
        (ONE_EXPERT_OVER, theirs.tensor, its.tensor),
    ):
        if wanted != found:
            field = f"critic.engine_options.{name}"
            what = f"policy.engine_options.{name} is {wanted} and {field} is {found} on the same devices"
            fix = "use the same, or give policy.devices and critic.devices"
            yield Problem(f"{what}; this version cannot run it", fix=fix, field=field)


def unbuilt_megatron(config: TrainingConfig, engines: Mapping[str, str]) -> Iterator[Problem]:
    """What is right to ask for and planned, and what is not installed. Args: engines by role."""
    ours = [role for role, engine in engines.items() if engine == ENGINE]
    for role in ours:
        section = learner_of(config, role)
        yield from planned_options(section.engine_options, starts_from(config, role), role=role)
    if len(ours) > 1:
        yield from _unlike(config)
    if ours and not is_installed("megatron"):
        yield replace(missing_library("megatron", f"{ours[0]}.engine={ENGINE}"), field=f"{ours[0]}.engine")


def _held_once(config: TrainingConfig, section: LearnerConfig | CriticConfig) -> bool:
    """Whether the optimizer is to be shared out, and no two devices hold the same weights."""
    settings, tensor = megatron_settings(section.engine_options)[0], section.tensor_parallel
    devices = config.placement.devices if section.devices is None else len(section.devices)
    over, one_over = settings.experts.split(tensor)
    return settings.distributed_optimizer and devices <= section.pipeline_parallel * min(tensor, over * one_over)


def megatron_warnings(config: TrainingConfig, trained: Trained) -> Iterator[str]:
    """What was asked for and has no effect."""
    for role, section in trained:
        if section.engine != ENGINE:
            continue
        yield from megatron_settings(section.engine_options, role=role)[2]
        yield from options_without_experts(section.engine_options, starts_from(config, role), role=role)
        if _held_once(config, section):
            yield f"{role}.engine_options.{DISTRIBUTED} has no effect: every weight is held once"
        if section.pipeline_parallel == 1:
            for where in virtual_options(section.engine_options, role=role):
                yield f"{where} has no effect: {role}.pipeline_parallel is 1, so there are no stages"
        if isinstance(section, CriticConfig) and section.activation_offload:
            yield f"critic.activation_offload has no effect: {_ACTIVATIONS}"
    if config.policy.engine != ENGINE:
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
