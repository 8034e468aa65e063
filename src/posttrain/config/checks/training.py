"""Rules between the keys of the update: precision, adapters, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import get_args

from posttrain.config import RunConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig, ScheduleConfig
from posttrain.descriptions import describe_functions
from posttrain.errors import Problem
from posttrain.registry import is_installed, missing_library

# Of an adapter that is loaded, its own count.
OF_THE_SAVED = ("rank", "alpha", "target_modules", "exclude_modules", "use_rslora")


def training_problems(config: RunConfig) -> Iterator[Problem]:
    """Report invalid settings."""
    yield from precision_problems(config.model)
    yield from schedule_problems("policy", config.policy.schedule)
    yield from schedule_problems("critic", config.critic.schedule)
    yield from decay_problems("policy", config.policy.optimizer)
    yield from decay_problems("critic", config.critic.optimizer)


def precision_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.master_dtype == "bfloat16" and model.compute_dtype != "bfloat16":
        yield Problem(
            f"{model.compute_dtype} compute with bfloat16 master weights would round what it has computed",
            fix="use model.compute_dtype=bfloat16, or model.master_dtype=float32",
            field="model.master_dtype",
        )


def missing_kernels(model: ModelConfig) -> Iterator[Problem]:
    """Report kernels that the model names and that are not installed."""
    if model.liger and not is_installed("liger_kernel"):
        yield replace(missing_library("liger_kernel", "model.liger"), field="model.liger")


def schedule_problems(role: str, schedule: ScheduleConfig) -> Iterator[Problem]:
    warmup, end = schedule.warmup_updates, schedule.decay_updates
    if warmup is not None and end is not None and end <= warmup:
        yield Problem(
            f"the learning rate reaches its floor at update {end}, and warms up until update {warmup}",
            fix=f"use {role}.schedule.decay_updates above {warmup}",
            field=f"{role}.schedule.decay_updates",
        )


def decay_problems(role: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Report a weight decay that turns weights around instead of shrinking them: an update multiplies them by 1 - lr x decay."""
    for name in ("weight_decay", "weight_decay_end"):
        decay = getattr(optimizer, name)
        if decay is not None and optimizer.lr * decay >= 1:
            what = f"{role}.optimizer.{name}={decay:g} with a learning rate of {optimizer.lr:g} leaves nothing of the weights"
            yield Problem(what, fix="use 0.01, for example; rate x decay is below 1", field=f"{role}.optimizer.{name}")


def training_warnings(config: RunConfig, *, uses_critic: bool) -> Iterator[str]:
    """Report settings that have no effect."""
    yield from role_warnings("policy", config.policy.schedule, config.policy.optimizer, config.policy.lora)
    yield from frozen_warnings("model", config.model, "policy", config.policy.lora)
    if uses_critic:
        yield from frozen_warnings("critic", config.critic, "critic", config.critic.lora)
        yield from role_warnings("critic", config.critic.schedule, config.critic.optimizer, config.critic.lora)
    if config.reference.offload:
        if config.policy.lora is not None and config.reference.path in (None, config.model.path):
            yield "reference.offload has no effect: the reference is the policy without its adapter"
        elif config.loss.kl_coef and config.loss.kl_estimator == "full":
            yield "reference.offload has no effect: loss.kl_estimator=full needs the reference in every micro-batch"
        elif config.reward.kl.coef and config.reward.kl.estimator == "full":
            yield "reference.offload has no effect: reward.kl.estimator=full computes policy and reference together"
    if config.model.padded and config.policy.share_prompts != type(config.policy).model_fields["share_prompts"].default:
        yield "policy.share_prompts has no effect: model.padded gives every sequence its own prompt"


def frozen_warnings(
    section: str, frozen: ModelConfig | CriticConfig, role: str, lora: LoraConfig | None
) -> Iterator[str]:
    """Report weights that are frozen twice."""
    if frozen.freeze_vision and lora is not None:
        yield f"{section}.freeze_vision has no effect: {role}.lora trains an adapter on the language model alone"
    if frozen.freeze and lora is not None:
        yield f"{section}.freeze has no effect: {role}.lora trains an adapter, and no weight of the model"


def role_warnings(
    role: str, schedule: ScheduleConfig, optimizer: OptimizerConfig, lora: LoraConfig | None
) -> Iterator[str]:
    """Report settings of one trained model that have no effect."""
    at = f"{role}.schedule"
    for name, readers in _readers().items():
        if getattr(schedule, name) != _default(ScheduleConfig, name) and schedule.name not in readers:
            yield f"{at}.{name} has no effect: the schedule is {schedule.name} ({', '.join(readers)} would read it)"
    if schedule.warmup_updates is not None and schedule.warmup_ratio > 0:
        yield f"{at}.warmup_ratio has no effect: {at}.warmup_updates is given"
    if schedule.warmup_rounding == "up" and (schedule.warmup_updates is not None or not schedule.warmup_ratio):
        yield f"{at}.warmup_rounding has no effect: no warmup_ratio is rounded"
    still = schedule.name == "constant" and not (schedule.warmup_updates or schedule.warmup_ratio)
    if schedule.moves_every == "step" and still:
        yield f"{at}.moves_every has no effect: the learning rate does not move"
    if schedule.warmup_start_ratio and not (schedule.warmup_updates or schedule.warmup_ratio):
        yield f"{at}.warmup_start_ratio has no effect: there is no warm-up"
    if optimizer.name == "adamw" and optimizer.momentum is not None:
        yield f"{role}.optimizer.momentum has no effect: {role}.optimizer.name is adamw, which has betas"
    if optimizer.name == "sgd":
        for name in ("betas", "eps"):
            if getattr(optimizer, name) != OptimizerConfig.model_fields[name].default:
                yield f"{role}.optimizer.{name} has no effect: {role}.optimizer.name is sgd"
    if optimizer.weight_decay_end is None and optimizer.weight_decay_shape != "linear":
        yield f"{role}.optimizer.weight_decay_shape has no effect: {role}.optimizer.weight_decay_end is null"
    if lora is not None and lora.adapter_path is not None:
        changed = [name for name in OF_THE_SAVED if getattr(lora, name) != _default(LoraConfig, name)]
        if changed:
            names = ", ".join(f"{role}.lora.{name}" for name in changed)
            yield f"{names}: no effect, because those of the adapter in {lora.adapter_path} count"


@cache
def _readers() -> dict[str, list[str]]:
    """The fields of a schedule that some shapes do not read, with the shapes that do: those whose function takes them."""
    functions = describe_functions("posttrain.algos.schedules")
    shapes = get_args(ScheduleConfig.model_fields["name"].annotation)
    found: dict[str, list[str]] = {}
    for field in ScheduleConfig.model_fields:
        setting = "total_updates" if field == "decay_updates" else field
        readers = [shape for shape in shapes if setting in functions[shape].settings]
        if 0 < len(readers) < len(shapes):
            found[field] = readers
    return found


def _default(section: type[ScheduleConfig] | type[LoraConfig], name: str) -> object:
    return section.model_fields[name].default
