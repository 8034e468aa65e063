"""Rules for roles that megatron trains: what it can do, with which model, and what has no effect with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from posttrain.config import RunConfig, TrainingConfig
from posttrain.errors import Problem
from posttrain.placement.megatron import megatron_settings, model_problems, planned_options
from posttrain.registry import is_installed, missing_library

ENGINE = "megatron"


def megatron_problems(config: TrainingConfig) -> Iterator[Problem]:
    """What cannot be run."""
    policy = config.policy
    if policy.engine != ENGINE:
        return
    settings, problems, _ = megatron_settings(policy.engine_options)
    yield from problems
    yield from model_problems(
        config.model.path,
        role="policy",
        tensor=policy.tensor_parallel,
        pipeline=policy.pipeline_parallel,
        settings=settings,
    )
    if policy.lora is not None:
        what = "megatron trains all weights, and policy.lora asks for an adapter"
        yield Problem(what, fix="use policy.engine=fsdp, or remove policy.lora", field="policy.lora")
    if isinstance(config, RunConfig) and config.loss.kl_coef and config.loss.kl_estimator == "full":
        what = "loss.kl_estimator=full compares whole vocabularies, which megatron's ranks have parts of"
        yield Problem(what, fix="use loss.kl_estimator=k3, or policy.engine=fsdp", field="loss.kl_estimator")


def unbuilt_megatron(config: TrainingConfig, engines: Mapping[str, str]) -> Iterator[Problem]:
    """What is right to ask for and planned, and what is not installed. Args: engines by role."""
    if engines.get("policy") == ENGINE:
        yield from planned_options(config.policy.engine_options)
    if engines.get("critic") == ENGINE:
        what = "a critic trained by megatron is planned; this version cannot run it"
        yield Problem(
            what,
            fix="use critic.engine=fsdp, which goes with any policy",
            field="critic.engine",
        )
    if engines.get("policy") == ENGINE and not is_installed("megatron"):
        yield replace(missing_library("megatron", f"policy.engine={ENGINE}"), field="policy.engine")


def megatron_warnings(config: TrainingConfig) -> Iterator[str]:
    """What was asked for and has no effect."""
    if config.policy.engine != ENGINE:
        return
    yield from megatron_settings(config.policy.engine_options)[2]
    for name, why in (
        ("liger", "megatron-core's layers are computed instead of the model's own"),
        ("compile", "megatron-core's layers are computed instead of the model's own"),
        ("activation_offload", "megatron keeps activations on the device, or recomputes them"),
    ):
        if getattr(config.model, name):
            yield f"model.{name} has no effect: {why}"
    if isinstance(config, RunConfig) and (config.loss.kl_coef or config.reward.kl.coef):
        if config.reference.offload:
            yield "reference.offload has no effect: with megatron the reference's parts stay on their devices"
        for name in config.reference.engine_options:
            yield f"reference.engine_options.{name} has no effect: the reference is split as the policy is"
