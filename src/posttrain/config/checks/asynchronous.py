"""Rules of asynchronous runs: bounds that can be met, engines that can do it, losses that know that their data is older."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.asynchronous import AsynchronousConfig, groups_in
from posttrain.config.roles import holds_a_copy, runtime_of
from posttrain.errors import Problem
from posttrain.registry import ROLLOUT_ENGINES

_SECTION = "asynchronous"
_MODE = f"{_SECTION}.mode"


def asynchronous_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that contradict each other, and parts of a run that asynchronous sampling cannot have."""
    section = config.asynchronous
    if not section.is_on:
        return
    yield from _bound_problems(section, config.data.prompts_per_step)
    yield from _engine_problems(config)
    if section.prepared_groups and (
        section.mode != "colocate" or not (config.environment.used and config.environment.workers)
    ):
        yield Problem(
            f"{_SECTION}.prepared_groups = {section.prepared_groups} starts environments ahead, which colocate does with "
            "environments in processes of their own",
            fix=f"use {_MODE}=colocate and environment.workers above 0, or {_SECTION}.prepared_groups=0",
            field=f"{_SECTION}.prepared_groups",
        )
    if section.cache_on_new_weights == "keep":
        yield from _cache_problems(config)
    if config.data.domains and section.prepared_groups:
        yield Problem(
            f"{_SECTION}.prepared_groups = {section.prepared_groups} fixes the order in which groups are admitted, and with "
            "data.domains each domain admits its own",
            fix=f"use {_SECTION}.prepared_groups=0, or remove data.domains",
            field=f"{_SECTION}.prepared_groups",
        )
    if "greedy_rewards" in config.advantage.about.inputs:
        yield Problem(
            f"{config.advantage.name} compares rewards with that of a greedy response, which newer weights would give than "
            "those that sampled",
            fix="use another estimator, such as advantage.name=grpo or rloo, or asynchronous.mode=off",
            field="advantage.name",
        )
    yield from _uncorrected(config)


def _uncorrected(config: RunConfig) -> Iterator[Problem]:
    section, teachers = config.asynchronous, config.distillation
    if teachers.alone and teachers.enters == "loss":
        return  # the divergence holds at any tokens, and the policy loss learns nothing
    if section.max_staleness_steps > 0 and not config.loss.corrects_for_sampler:
        yield Problem(
            f"{config.loss.name} takes responses as if the weights at the start of the step had sampled them, and they may be "
            f"{math.ceil(section.max_staleness_steps)} {'steps' if section.max_staleness_steps > 1 else 'step'} older",
            fix=_correction(config),
            field="loss.name",
        )


def _correction(config: RunConfig) -> str:
    weights = "loss.rollout_correction.weights=token (the ratio stays that to the start of the step: decoupled PPO)"
    if config.loss.about.facts.has_ratio and "old_logprobs" in config.loss.about.inputs:
        return f"use {weights}, or loss.rollout_correction.use_rollout_logprobs=true (the ratio is to the sampler)"
    return f"use {weights}"


def _bound_problems(section: AsynchronousConfig, prompts: int) -> Iterator[Problem]:
    staleness, running = section.max_staleness_steps, section.max_running_groups
    every = section.sync_every_steps
    if section.mode != "separate" and not section.sync_between_tokens:
        yield Problem(
            f"{_SECTION}.sync_between_tokens = false is for separate, and the mode is {section.mode}",
            fix=f"use {_SECTION}.sync_between_tokens=true, or {_MODE}=separate",
            field=f"{_SECTION}.sync_between_tokens",
        )
    if section.mode != "separate" and every != 1:
        yield Problem(
            f"{_SECTION}.sync_every_steps = {every}, and {section.mode} gives the sampler new weights after every step",
            fix=f"use {_SECTION}.sync_every_steps=1, or {_MODE}=separate",
            field=f"{_SECTION}.sync_every_steps",
        )
    elif section.mode == "separate" and every - 1 > int(staleness):
        yield Problem(
            f"{_SECTION}.sync_every_steps = {every} lets a step train on weights of {every - 1} steps before, and "
            f"{_SECTION}.max_staleness_steps = {staleness} forbids it",
            fix=f"use {_SECTION}.sync_every_steps={int(staleness) + 1}, or {_SECTION}.max_staleness_steps={every - 1}",
            field=f"{_SECTION}.sync_every_steps",
        )
    if section.mode == "one_step":
        if staleness != 1:
            yield Problem(
                f"one_step trains on what the weights of one step before have sampled, and {_SECTION}.max_staleness_steps is "
                f"{staleness}",
                fix=f"use {_SECTION}.max_staleness_steps=1, or {_MODE}={'colocate' if staleness else 'off'}",
                field=f"{_SECTION}.max_staleness_steps",
            )
        for name, value, off in (("on_stale", section.on_stale, "wait"), ("max_running_groups", running, None)):
            if value != off:
                yield Problem(
                    f"{_SECTION}.{name} = {value} has no meaning in one_step, which samples whole batches and waits for them",
                    fix=f"use {_SECTION}.{name}={off or 'null'}, or {_MODE}=colocate",
                    field=f"{_SECTION}.{name}",
                )
        return
    most = prompts + groups_in(staleness, prompts)
    if running is not None and not prompts <= running <= most:
        yield Problem(
            f"{_SECTION}.max_running_groups = {running} is outside of {prompts} to {most}: a step trains on {prompts} groups, "
            f"and no more than {prompts} x ({staleness} + 1) can be trained within the bound",
            fix=f"use {_SECTION}.max_running_groups={min(max(running, prompts), most)}, or another "
            f"{_SECTION}.max_staleness_steps",
            field=f"{_SECTION}.max_running_groups",
        )
    if section.on_stale == "drop" and staleness % 1:
        yield Problem(
            f"{_SECTION}.max_staleness_steps = {staleness} limits the oldest groups of a step, which drop does not choose",
            fix=f"use {_SECTION}.max_staleness_steps={math.ceil(staleness)}, or {_SECTION}.on_stale=wait",
            field=f"{_SECTION}.max_staleness_steps",
        )


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.asynchronous.mode == "separate":
        yield from _placement_problems(config)
    if config.asynchronous.mode != "colocate":
        return
    engine = config.rollout.engine
    if engine in ROLLOUT_ENGINES.names() and not ROLLOUT_ENGINES.facts(engine).resumes_responses:
        able = " or ".join(ROLLOUT_ENGINES.stating("resumes_responses"))
        yield Problem(
            f"colocate hands unfinished responses back to the sampler under newer weights, which {engine} cannot continue",
            fix=f"use rollout.engine={able}, or {_MODE}=one_step",
            field="rollout.engine",
        )
    policy, rollout = _devices_of(config)
    if runtime_of(config.placement) == "ray" and policy != rollout:
        yield Problem(
            f"colocate samples on the policy's devices {policy}, whose workers stop after the same passes, and the sampler is "
            f"placed on {rollout}",
            fix=f"use rollout.devices={policy}, or {_MODE}=separate with devices that the policy does not have",
            field="rollout.devices",
        )


def _devices_of(config: RunConfig) -> tuple[list[int], list[int]]:
    """The devices of the policy and of the sampler."""
    every = list(range(config.placement.devices))
    return config.policy.devices or every, every if config.rollout.devices is None else config.rollout.devices


def _cache_problems(config: RunConfig) -> Iterator[Problem]:
    field, engine = f"{_SECTION}.cache_on_new_weights", config.rollout.engine
    recompute = f"use {field}=recompute"
    if config.asynchronous.mode == "one_step":
        yield Problem(
            f"{field} = keep has no meaning in one_step, whose responses are complete when the weights change",
            fix=f"{recompute}, or {_MODE}=colocate",
            field=field,
        )
    elif not config.asynchronous.sync_between_tokens:
        yield Problem(
            f"{field} = keep has no meaning with {_SECTION}.sync_between_tokens = false, whose responses are complete when the "
            "weights change",
            fix=f"{recompute}, or {_SECTION}.sync_between_tokens=true",
            field=field,
        )
    elif engine in ROLLOUT_ENGINES.names() and not ROLLOUT_ENGINES.facts(engine).keeps_cache:
        able = " or ".join(ROLLOUT_ENGINES.stating("keeps_cache"))
        yield Problem(
            f"{engine} cannot keep the keys and values of unfinished responses when its weights change",
            fix=f"{recompute}, or rollout.engine={able}",
            field=field,
        )
    elif config.rollout.routing_replay:
        yield Problem(
            f"rollout.routing_replay needs the experts of every token, and with {field} = keep tokens of older weights are not "
            "routed again",
            fix=f"{recompute}, or rollout.routing_replay=false",
            field=field,
        )


def _placement_problems(config: RunConfig) -> Iterator[Problem]:
    """Report samplers that share devices with the policy."""
    place, rollout = config.placement, config.rollout
    if rollout.endpoints or rollout.engine not in ROLLOUT_ENGINES.names():
        return
    instead = f"{_MODE}={'colocate' if ROLLOUT_ENGINES.facts(rollout.engine).resumes_responses else 'one_step'}"
    if runtime_of(place) == "inprocess":
        if not holds_a_copy(rollout.engine):
            yield Problem(
                f"separate needs samplers with weights of their own, and in one process {rollout.engine} reads the trainer's",
                fix=f"use placement.devices=2 policy.devices=[0] rollout.devices=[1], or {instead}",
                field=_MODE,
            )
        return
    policy, samplers = _devices_of(config)
    shared = sorted(set(policy) & set(samplers))
    if not shared:
        return
    where = f"device {shared[0]}" if len(shared) == 1 else f"devices {shared[0]} to {shared[-1]}"
    if shared != list(range(shared[0], shared[-1] + 1)):
        where = f"devices {', '.join(map(str, shared))}"
    half = max(place.devices // 2, 1)
    devices = max(place.devices, 2)
    apart = f"policy.devices={list(range(half))} rollout.devices={list(range(half, devices))}"
    more = "" if place.devices > 1 else f"placement.devices={devices} "
    yield Problem(
        f"separate samples while the policy trains, and both are placed on {where}",
        fix=f"use {more}{apart}, or {_MODE}=one_step",
        field="rollout.devices",
    )


def asynchronous_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings that have no effect, in sentences, and what a resumed run cannot repeat."""
    section, default = config.asynchronous, AsynchronousConfig()
    if section.mode in ("colocate", "separate") and config.environment.used:
        yield (
            "of the episodes that had not ended when a run was stopped, a resumed run continues those whose environment can be "
            "saved (with state and restore, as text games have); the others begin again. "
            "With workers of their own, they answer when they answer, so two runs differ"
        )
    bound, prompts = section.max_staleness_steps, config.data.prompts_per_step
    if section.is_on and bound % 1 and groups_in(bound, prompts) == int(bound) * prompts:
        yield (
            f"{_SECTION}.max_staleness_steps={bound} is the same as {int(bound)}: {bound % 1:g} of a step's {prompts} prompts is "
            "less than one group"
        )
    engine = config.rollout.engine
    if section.mode == "separate" and engine in ROLLOUT_ENGINES.names():
        if not ROLLOUT_ENGINES.facts(engine).resumes_responses:
            yield (
                f"{engine} cannot continue a response under new weights: before each weight sync the responses that it has begun "
                "end under the old ones, and a checkpoint keeps none of their tokens"
            )
        if section.max_staleness_steps == 0:
            yield f"with {_SECTION}.max_staleness_steps=0 the samplers wait while the trainer works, and it for them"
    if not section.is_on:
        changed = [name for name in AsynchronousConfig.model_fields if getattr(section, name) != getattr(default, name)]
        if changed:
            have = "have" if len(changed) > 1 else "has"
            names = ", ".join(f"{_SECTION}.{name}" for name in changed)
            yield f"{names} {have} no effect: {_MODE} is off"
    elif section.on_stale == "drop" and section.max_staleness_steps == 0:
        yield f"{_SECTION}.on_stale has no effect: with {_SECTION}.max_staleness_steps=0 a step takes all that was started"
