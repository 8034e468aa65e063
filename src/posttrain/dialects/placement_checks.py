"""Rules between engines and the ways of sharing a model out: which engine can do what, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.errors import Problem
from posttrain.placement.batch import needs_values
from posttrain.placement.roles import fsdp_options
from posttrain.placement.sharding import fsdp_settings

SPLIT_LAYERS = ("megatron",)  # engines that share layers' matrices, or the layers
SPLIT_SEQUENCES = ("fsdp", "megatron")  # engines that share a sequence


def placement_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Sizes that a role's engine has no use for."""
    for role, section in _trained(config):
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


def placement_warnings(config: TrainingConfig) -> Iterator[str]:
    """Options of engines that have no effect."""
    sections = _trained(config)
    for role, section in sections:
        if section.engine == "local" and section.engine_options:
            names = ", ".join(section.engine_options)
            yield f"{role}.engine_options has no effect: the local engine reads none ({names})"
    roles = [role for role, section in sections if section.engine == "fsdp"]
    if (
        isinstance(config, RunConfig)
        and config.policy.engine == "fsdp"
        and (config.loss.kl_coef or config.reward.kl.coef)
    ):
        roles.append("reference")
    for role in roles:
        yield from fsdp_settings(fsdp_options(config, role), config.placement.devices, role=role)[2]


def _trained(config: TrainingConfig) -> list[tuple[str, LearnerConfig | CriticConfig]]:
    found: list[tuple[str, LearnerConfig | CriticConfig]] = [("policy", config.policy)]
    if isinstance(config, RunConfig) and needs_values(config.advantage.name):
        found.append(("critic", config.critic))
    return found
