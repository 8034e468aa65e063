"""Rules between engines and the ways of sharing a model out: which engine can do what, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import trained_roles
from posttrain.errors import Problem
from posttrain.plan.checks.megatron import megatron_problems, megatron_warnings
from posttrain.plan.roles import sharing_options
from posttrain.plan.sharding import fsdp_settings
from posttrain.plan.zero import zero_settings

SPLIT_LAYERS = ("megatron",)  # engines that share layers' matrices, or the layers
SPLIT_SEQUENCES = ("fsdp", "deepspeed", "megatron")  # engines that share a sequence


def placement_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Sizes that a role's engine has no use for."""
    for role, section in trained_roles(config):
        devices = config.placement.devices if section.devices is None else len(section.devices)
        if section.engine == "local" and devices > 1:
            what = f"the {role} has {devices} devices, and {role}.engine=local trains on one"
            yield Problem(what, fix=f"use {role}.engine=fsdp, or {role}.devices=[0]", field=f"{role}.engine")
        for name, able in (
            ("tensor_parallel", SPLIT_LAYERS),
            ("pipeline_parallel", SPLIT_LAYERS),
            ("sequence_parallel", SPLIT_SEQUENCES),
        ):
            size = getattr(section, name)
            if size > 1 and section.engine not in able:
                what = f"{role}.{name} is {size}, and {role}.engine={section.engine} does not split that way"
                fix = f"use {role}.{name}=1, or {role}.engine={able[0]}"
                yield Problem(what, fix=fix, field=f"{role}.{name}")
    yield from megatron_problems(config, trained_roles(config))


def placement_warnings(config: TrainingConfig) -> Iterator[str]:
    """Options of engines that have no effect."""
    sections = trained_roles(config)
    for role, section in sections:
        if section.engine == "local" and section.engine_options:
            names = ", ".join(section.engine_options)
            yield f"{role}.engine_options has no effect: the local engine reads none ({names})"
    engines = {role: section.engine for role, section in sections}
    if isinstance(config, RunConfig) and (config.loss.kl_coef or config.reward.kl.coef):
        engines["reference"] = config.policy.engine
    for role, engine in engines.items():
        options, devices = sharing_options(config, role), config.placement.devices
        if engine == "fsdp":
            yield from fsdp_settings(options, devices, role=role)[2]
        if engine == "deepspeed":
            yield from zero_settings(options, devices, role=role, compute_dtype=config.model.compute_dtype)[2]
    yield from _deepspeed_warnings(config, sections)
    yield from megatron_warnings(config, sections)


def _deepspeed_warnings(
    config: TrainingConfig, sections: list[tuple[str, LearnerConfig | CriticConfig]]
) -> Iterator[str]:
    """Settings of all engines that DeepSpeed has ways of its own for."""
    roles = [(role, section) for role, section in sections if section.engine == "deepspeed"]
    if roles and config.model.master_dtype != "float32":
        yield f"model.master_dtype={config.model.master_dtype} has no effect with deepspeed: its masters are float32"
    for role, section in roles:
        if section.optimizer.offload:
            yield (
                f"{role}.optimizer.offload has no effect with deepspeed: "
                f"{role}.engine_options.zero_optimization.offload_optimizer.device=cpu keeps its state on the CPU"
            )
