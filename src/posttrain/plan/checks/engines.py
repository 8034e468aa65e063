"""Checks of training engines: what each can do, its options, and what has no effect with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.process_reward import PROCESS_REWARD
from posttrain.config.roles import (
    needs_old_logprobs,
    replaces_old_logprobs,
    several_updates,
    trained_roles,
    uses_reference,
)
from posttrain.errors import Problem
from posttrain.plan.engine import EnginePlan, Learners, engine_options, engine_plan, engine_plans, engine_that
from posttrain.registry import ROLLOUT_ENGINES, is_installed, missing_library

_BALANCE = "loss.router_balance_coef"


def engine_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Yield what a role's engine cannot do."""
    for plan, learners in engines_of(config):
        yield from plan.problems(config, learners)
        for role, section in learners:
            yield from _optimizer_problems(plan, role, section.optimizer.name)
            if config.model.compute_dtype == "float16" and not plan.scales_losses:
                what = f"model.compute_dtype is float16, and the engine {plan.name} does not scale losses"
                other = engine_that(lambda engine: engine.scales_losses and engine.shares_out)
                fix = f"use model.compute_dtype=bfloat16, or {role}.engine={other}"
                yield Problem(what, fix=fix, field="model.compute_dtype")
            for name, can in (
                ("tensor_parallel", lambda engine: engine.splits_layers),
                ("pipeline_parallel", lambda engine: engine.splits_layers),
                ("sequence_parallel", lambda engine: engine.splits_sequences),
            ):
                size = getattr(section, name)
                if size > 1 and not can(plan):
                    what = f"{role}.{name} is {size}, and {role}.engine={section.engine} does not split that way"
                    fix = f"use {role}.{name}=1, or {role}.engine={engine_that(can)}"
                    yield Problem(what, fix=fix, field=f"{role}.{name}")


def process_engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what the policy's engine cannot do for the process reward model, which it trains too."""
    process = config.reward.process
    if process is None:
        return
    plan = engine_plan(config.policy.engine)
    if process.optimizer.name not in plan.optimizers:
        field = f"{PROCESS_REWARD}.optimizer.name"
        able = " or ".join(plan.optimizers)
        what = f"{field} is {process.optimizer.name}, and policy.engine={plan.name} updates with {able}"
        yield Problem(what, fix=f"use {field}={plan.optimizers[0]}", field=field)
    if process.engine_options:  # the policy's are judged with the policy
        devices, options = config.policy.devices, engine_options(config, PROCESS_REWARD)
        ranks = config.placement.devices if devices is None else len(devices)
        yield from plan.option_problems(options, max(1, ranks), PROCESS_REWARD)


def _optimizer_problems(plan: EnginePlan, role: str, name: str) -> Iterator[Problem]:
    if name not in plan.optimizers:
        what = (
            f"{role}.optimizer.name is {name}, and the engine {plan.name} updates with {' or '.join(plan.optimizers)}"
        )
        others = engine_that(lambda engine: name in engine.optimizers and engine.shares_out == plan.shares_out)
        fix = f"use {role}.optimizer.name={plan.optimizers[0]}, or {role}.engine={others}"
        yield Problem(what, fix=fix, field=f"{role}.optimizer.name")


def sharded_saving_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Yield the engines whose processes cannot save a part each."""
    if not config.checkpoint.sharded:
        return
    for plan, learners in engines_of(config):
        if not plan.saves_parts:
            for role, _ in learners:
                parts = f"the processes' parts of the {role} are no parts of its tensors"
                what = f"checkpoint.sharded: with the engine {plan.name} {parts}"
                other = engine_that(lambda engine: engine.shares_out and engine.saves_parts)
                fix = f"leave checkpoint.sharded out, or use {role}.engine={other}"
                yield Problem(what, fix=fix, field="checkpoint.sharded")


def reference_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why the reference cannot follow the policy."""
    if config.reference.update_every is None or not uses_reference(config):
        return
    field, frozen = "reference.update_every", "reference.update_every=null"
    if config.policy.lora is not None:
        what = f"{field}: the policy is an adapter, and the reference the model below it, which stays as it is"
        yield Problem(what, fix=f"train all weights (policy.lora=null), or use {frozen}", field=field)
    elif not engine_plan(config.policy.engine).moves_reference:
        what = f"{field}: policy.engine={config.policy.engine} cannot mix its weights into the reference"
        other = engine_that(lambda engine: engine.shares_out and engine.moves_reference)
        yield Problem(what, fix=f"use policy.engine={other}, or {frozen}", field=field)


def scoring_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield an engine that does not compute reward models."""
    model = config.reward.model
    if model is not None and not engine_plan(model.engine).scores_responses:
        able = " or ".join(plan.name for plan in engine_plans() if plan.scores_responses)
        field = "reward.model.engine"
        yield Problem(f"{field}={model.engine} does not compute reward models", fix=f"use {able}", field=field)


def quantized_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Yield the engines that cannot train an adapter on 4-bit weights."""
    for plan, learners in engines_of(config):
        for role, section in learners:
            lora = section.lora
            if lora is not None and lora.quantize is not None and not plan.quantizes:
                whole = f"the engine {plan.name} cuts weights into parts, and 4-bit blocks stay whole"
                what = f"{role}.lora.quantize={lora.quantize}: {whole}"
                other = engine_that(lambda engine: engine.quantizes)
                fix = f"use {role}.engine={other} on one device, or {role}.lora.quantize=null"
                yield Problem(what, fix=fix, field=f"{role}.lora.quantize")


def _can(plan: EnginePlan, field: str) -> bool:
    """Tell whether an engine can do to routers what a field asks for."""
    return plan.balances_experts if field == _BALANCE else plan.replays_experts


def _shares_out_and_can(field: str, plan: EnginePlan) -> bool:
    return plan.shares_out and _can(plan, field)


def router_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why experts cannot be replayed or balanced in this run."""
    replay, again = "rollout.routing_replay", "policy.routing_replay"
    asked = [replay] * config.rollout.routing_replay + [again] * config.policy.routing_replay
    asked += [_BALANCE] * bool(config.loss.router_balance_coef)
    if config.rollout.routing_replay and config.policy.routing_replay:
        what = f"{again} and {replay} replay two choices of experts: that of the old log-probs, and the sampler's"
        yield Problem(what, fix="use one of them", field=again)
    engine = config.policy.engine
    for field in asked:
        if not _can(engine_plan(engine), field):
            other = engine_that(partial(_shares_out_and_can, field))
            what = f"{field} is not supported by policy.engine={engine}"
            yield Problem(what, fix=f"use policy.engine={other}", field=field)
    if config.rollout.routing_replay:
        sampler = config.rollout.engine
        if sampler in ROLLOUT_ENGINES.names() and not ROLLOUT_ENGINES.facts(sampler).records_experts:
            able = ", ".join(ROLLOUT_ENGINES.stating("records_experts"))
            what = f"{replay}: rollout.engine={sampler} does not report the experts of its tokens"
            yield Problem(what, fix=f"use rollout.engine={able}, or {replay}=false", field=replay)
        if config.environment.used:
            what = f"{replay} is for single-turn responses: experts are not kept from turn to turn"
            yield Problem(what, fix=f"use {replay}=false", field=replay)


def router_warnings(config: RunConfig) -> Iterator[str]:
    """Yield that there is no pass whose choice of experts could be replayed."""
    if not config.policy.routing_replay or needs_old_logprobs(config):
        return
    if replaces_old_logprobs(config):
        why = "the sampler's log-probs are the old ones, so no pass computes these"
        yield f"policy.routing_replay has no effect: {why}; rollout.routing_replay replays the sampler's experts"
    elif not several_updates(config):
        yield "policy.routing_replay has no effect: a step makes one update, whose own pass computes the old log-probs"


def reference_warnings(config: RunConfig) -> Iterator[str]:
    """Yield settings of a reference that moves which have no effect."""
    reference = config.reference
    if reference.update_every is not None and not uses_reference(config):
        yield "reference.update_every has no effect: loss.kl_coef and reward.kl.coef are 0, so no reference model is loaded"
    if reference.update_every is None and reference.update_mix != 1.0:
        yield "reference.update_mix has no effect: reference.update_every is null"


def engine_warnings(config: TrainingConfig) -> Iterator[str]:
    """Yield options of engines, and settings with these engines, that have no effect."""
    engines = {role: section.engine for role, section in trained_roles(config)}
    if uses_reference(config):
        engines["reference"] = config.policy.engine
    for role, engine in engines.items():
        options, devices = engine_options(config, role), config.placement.devices
        yield from engine_plan(engine).option_warnings(options, devices, role, config.model.compute_dtype)
    if isinstance(config, RunConfig) and config.reward.process is not None:
        own, devices = config.reward.process.engine_options, config.placement.devices
        trained_by = engine_plan(config.policy.engine)
        yield from trained_by.option_warnings(own, devices, PROCESS_REWARD, config.model.compute_dtype)
    for plan, learners in engines_of(config):
        yield from plan.warnings(config, learners)


def unsupported_engines(config: TrainingConfig, *, in_process: bool) -> Iterator[Problem]:
    """Yield what can be planned and not run: engines that this runtime or this version lacks something for."""
    for plan, learners in engines_of(config):
        if in_process and plan.shares_out:
            for role, _ in learners:
                yield Problem(
                    f"{plan.name} shares the {role} out over worker processes, and placement.runtime=inprocess has none",
                    fix=f"use placement.runtime=ray, or {engine_that(lambda engine: engine.keeps_whole)}",
                    field=f"{role}.engine",
                )
        elif not in_process:
            yield from plan.unsupported(config, learners)
            if plan.library is not None and not is_installed(plan.library):
                for role, _ in learners:
                    problem = missing_library(plan.library, f"{role}.engine={plan.name}")
                    yield replace(problem, field=f"{role}.engine")


def engines_of(config: TrainingConfig) -> list[tuple[EnginePlan, Learners]]:
    """Return the engines of a run with the roles that each trains."""
    trained = trained_roles(config)
    names = dict.fromkeys(section.engine for _, section in trained)
    return [(engine_plan(name), [each for each in trained if each[1].engine == name]) for name in names]
