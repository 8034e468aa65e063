"""From a configuration to a PlacementPlan: which model sits on which devices, how it is split there, when it makes room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import learner_of, needs_values, runtime_of, shares_weights
from posttrain.errors import Problem
from posttrain.plan.experts import EXPERTS_OVER, ONE_EXPERT_OVER
from posttrain.plan.megatron import megatron_settings
from posttrain.plan.placement import GroupSizes, Phase, PlacementPlan, Rank, RolePlacement
from posttrain.plan.sharding import fsdp_settings
from posttrain.plan.zero import zero_settings

ZERO_REST = {"offload_param": {"device": "cpu"}}  # in DeepSpeed's words: weights that rest on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the configuration says about a role."""

    role: str
    field: str  # of its devices
    engine: str
    devices: list[int] | None
    sizes: GroupSizes  # but data and shard, which depend on the devices
    awake: tuple[Phase, ...]
    rests: tuple[str, ...] = ()
    servers: int = 0  # outside of the run's devices


def place(config: TrainingConfig) -> tuple[PlacementPlan | None, list[Problem]]:
    """The plan, or why there is none: with the arithmetic, the setting it comes from, and what would do."""
    place = config.placement
    problems = _of_the_run(place)
    asked = _roles(config)
    for each in asked:
        problems += _problems(place, each)
    for each in asked:
        if each.engine == "fsdp":
            ranks = place.devices if each.devices is None else len(each.devices)
            problems += fsdp_settings(sharing_options(config, each.role), max(1, ranks), role=each.role)[1]
        if each.engine == "deepspeed":
            ranks = place.devices if each.devices is None else len(each.devices)
            problems += zero_settings(sharing_options(config, each.role), max(1, ranks), role=each.role)[1]
    if problems:
        return None, problems
    per_node = place.devices // place.nodes
    every = list(range(place.devices))
    where = {each.role: each.devices if each.devices is not None else every for each in asked}
    return PlacementPlan(
        runtime=runtime_of(place),
        device=place.device,
        nodes=place.nodes,
        devices=place.devices,
        roles=tuple(
            RolePlacement(
                role=each.role,
                engine=each.engine,
                ranks=_ranks(where[each.role], per_node),
                sizes=_sizes(config, each, len(where[each.role])),
                awake=each.awake,
                rests=each.rests,
                shared_with=tuple(
                    other for other in where if other != each.role and set(where[other]) & set(where[each.role])
                ),
                uses_weights_of=_lender(config, each, where),
            )
            for each in asked
        ),
    ), []


def sharing_options(config: TrainingConfig, role: str) -> dict[str, Any]:
    """What says how a role's engine shares it out."""
    if role == "reference" and isinstance(config, RunConfig):
        given = config.reference.engine_options
        if not config.reference.offload:
            return given
        if config.policy.engine == "deepspeed":
            return given | {"zero_optimization": (given.get("zero_optimization") or {}) | ZERO_REST}
        return given | {"cpu_offload": True}
    return learner_of(config, role).engine_options


def _of_the_run(place: PlacementConfig) -> list[Problem]:
    problems = []
    if place.devices % place.nodes:
        what = f"{place.devices} devices do not spread evenly over {place.nodes} nodes"
        fits = [place.devices // place.nodes * place.nodes, -(-place.devices // place.nodes) * place.nodes]
        fix = "use " + " or ".join(f"placement.devices={count}" for count in fits if count)
        problems.append(Problem(what, fix=fix, field="placement.devices"))
    if place.runtime == "inprocess" and place.devices > 1:
        what = f"placement.runtime=inprocess has one process for one device, and the run has {place.devices}"
        problems.append(Problem(what, fix="use placement.runtime=ray, or 1 device", field="placement.runtime"))
    return problems


def _roles(config: TrainingConfig) -> list[_Asked]:
    """The roles of this run, in the order a step needs them. Supervised fine-tuning has the policy alone."""
    return _roles_of_a_step(config) if isinstance(config, RunConfig) else [_policy(config.policy, ("update",))]


def _policy(policy: LearnerConfig, awake: tuple[Phase, ...]) -> _Asked:
    return _Asked(
        role="policy",
        field="policy.devices",
        engine=policy.engine,
        devices=policy.devices,
        sizes=_trained_sizes(policy),
        awake=awake,
        rests=_learner_rests(policy),
    )


def _roles_of_a_step(config: RunConfig) -> list[_Asked]:
    policy, critic, rollout, reward = config.policy, config.critic, config.rollout, config.reward.model
    elsewhere = not shares_weights(rollout.engine) and bool(rollout.endpoints)  # servers that the run did not start
    asked = [
        _Asked(
            role="rollout",
            field="rollout.devices",
            engine=rollout.engine,
            devices=[] if elsewhere else rollout.devices,
            servers=len(rollout.endpoints) if elsewhere else 0,
            sizes=GroupSizes() if elsewhere else _sampler_sizes(config),
            awake=("rollout",),
            rests=_sampler_rests(config),
        )
    ]
    if reward is not None:
        asked.append(
            _Asked(
                role="reward model",
                field="reward.model.devices",
                engine="local",
                devices=reward.devices,
                sizes=GroupSizes(),
                awake=("reward",),
            )
        )
    asked.append(_policy(policy, ("log-probs", "update")))
    if config.loss.kl_coef or config.reward.kl.coef:
        asked.append(
            _Asked(
                role="reference",
                field="reference.devices",
                engine=policy.engine,
                devices=config.reference.devices,
                sizes=_trained_sizes(policy),
                awake=("log-probs",),
                rests=("weights",) if config.reference.offload else (),
            )
        )
    if needs_values(config.advantage.name):
        asked.append(
            _Asked(
                role="critic",
                field="critic.devices",
                engine=critic.engine,
                devices=critic.devices,
                sizes=_trained_sizes(critic),
                awake=("values", "update"),
                rests=_learner_rests(critic),
            )
        )
    return asked


def _trained_sizes(section: LearnerConfig | CriticConfig) -> GroupSizes:
    megatron = section.engine == "megatron"
    experts, one_expert = 1, 1
    if megatron:
        experts, one_expert = megatron_settings(section.engine_options)[0].experts.split(section.tensor_parallel)
    return GroupSizes(
        tensor=section.tensor_parallel,
        pipeline=section.pipeline_parallel,
        sequence=1 if megatron else section.sequence_parallel,
        context=section.sequence_parallel if megatron else 1,
        expert=experts,
        expert_tensor=one_expert,
    )


def _sampler_sizes(config: RunConfig) -> GroupSizes:
    options = config.rollout.engine_options
    pipeline = options.get("pipeline_parallel_size") or options.get("inference_engine_pipeline_parallel_size")
    return GroupSizes(
        tensor=config.rollout.tensor_parallel,
        pipeline=pipeline if isinstance(pipeline, int) and not isinstance(pipeline, bool) and pipeline > 0 else 1,
    )


def leaves(config: TrainingConfig, role: str) -> bool:
    """Whether the weights of a role that is trained leave its device while others work there."""
    return "weights" in _learner_rests(learner_of(config, role))


def _learner_rests(section: LearnerConfig | CriticConfig) -> tuple[str, ...]:
    settings = fsdp_settings(section.engine_options, 1)[0] if section.engine == "fsdp" else None
    weights = ("weights",) if settings and settings.param_offload else ()
    by_engine = settings is not None and settings.optimizer_offload
    if section.engine == "megatron":
        by_engine = megatron_settings(section.engine_options)[0].optimizer_offload
    asked = section.optimizer.offload and section.engine != "deepspeed"  # which has a way of its own
    return (*weights, "optimizer") if asked or by_engine else weights


def _sampler_rests(config: RunConfig) -> tuple[str, ...]:
    """vLLM's sleep leaves with weights and cache, SGLang's with the cache; native and hf hold a cache only while they sample."""
    rollout = config.rollout
    if shares_weights(rollout.engine):
        return ("cache",)
    if not rollout.engine_options.get("free_cache_engine"):
        return ()
    return {"vllm": ("weights", "cache"), "sglang": ("cache",)}.get(rollout.engine, ())


def _lender(config: TrainingConfig, asked: _Asked, where: dict[str, list[int]]) -> str | None:
    """The role whose weights this one reads where they are."""
    if not isinstance(config, RunConfig):
        return None
    if asked.role == "rollout" and shares_weights(asked.engine):
        whole = config.policy.engine == "local" and where["rollout"] == where["policy"]
        return "policy" if whole else None
    adapted = config.policy.lora is not None and config.reference.path in (None, config.model.path)
    return "policy" if asked.role == "reference" and adapted and where["reference"] == where["policy"] else None


def _sizes(config: TrainingConfig, asked: _Asked, ranks: int) -> GroupSizes:
    sizes = asked.sizes
    shard = 1
    if asked.role in ("policy", "reference", "critic"):
        if asked.engine == "fsdp":
            shard = fsdp_settings(sharing_options(config, asked.role), ranks)[0].shard
        elif asked.engine == "deepspeed":
            shard = zero_settings(sharing_options(config, asked.role), ranks)[0].spread(ranks)[0]
    return replace(sizes, data=asked.servers or ranks // sizes.per_copy, shard=shard)


def _ranks(devices: Sequence[int], per_node: int) -> tuple[Rank, ...]:
    return tuple(
        Rank(rank=rank, device=device, node=device // per_node, local_device=device % per_node)
        for rank, device in enumerate(devices)
    )


def _problems(place: PlacementConfig, asked: _Asked) -> list[Problem]:
    role, devices, field, total = asked.role, asked.devices, asked.field, place.devices
    if asked.servers:
        return []
    if devices is not None and not devices:
        return [Problem(f"the {role} has no device", fix="name at least one", field=field)]
    wrong = [number for number in devices or [] if number not in range(total)]
    if wrong:
        what = f"the {role} is put on device {wrong[0]}, and there are {total} devices, 0 to {total - 1}"
        return [Problem(what, fix=f"use placement.devices={max(wrong) + 1}, or other devices", field=field)]
    if devices is not None and len(set(devices)) < len(devices):
        return [Problem(f"the {role} is put on the same device twice", fix="name each once", field=field)]
    count, split = total if devices is None else len(devices), asked.sizes.per_copy
    if count % split:
        return [_does_not_split(asked, count, split)]
    return _experts_do_not_split(asked, count // asked.sizes.pipeline)


def _experts_do_not_split(asked: _Asked, stage: int) -> list[Problem]:
    """Args: stage: devices that have the same layers."""
    experts, one_expert = asked.sizes.expert, asked.sizes.expert_tensor
    if stage % (experts * one_expert) == 0:
        return []
    owner = "policy" if asked.role == "reference" else asked.role  # whose sizes the reference has
    sizes = f"{experts} that share them x {one_expert} that share each = {experts * one_expert}"
    what = f"the {asked.role} has its experts on {stage} devices, which do not split into groups of {sizes}"
    fits = [size for size in range(experts, 0, -1) if stage % (size * one_expert) == 0]
    name = f"{owner}.engine_options.{EXPERTS_OVER if fits else ONE_EXPERT_OVER}"
    return [Problem(what, fix=f"use {name}={fits[0] if fits else 1}", field=name)]


def _does_not_split(asked: _Asked, count: int, split: int) -> Problem:
    role, sizes = asked.role, asked.sizes
    owner = "policy" if role == "reference" else role  # whose sizes the reference has
    shared = {
        f"{owner}.tensor_parallel": sizes.tensor,
        f"{owner}.sequence_parallel": sizes.sequence * sizes.context,
        f"{owner}.pipeline_parallel": sizes.pipeline,
    }
    product = [(name, size) for name, size in shared.items() if size > 1]
    arithmetic = " x ".join(f"{name} {size}" for name, size in product)
    if len(product) > 1:
        arithmetic += f" = {split}"
    what = (
        f"the {role} has {count} device{'s' * (count > 1)}, which are no multiple of the {split} that share one copy "
    )
    name, size = product[0]
    fits = [smaller for smaller in range(size, 0, -1) if count % (split // size * smaller) == 0]
    other = f", or {name}={fits[0]}" if fits else ""
    return Problem(f"{what}({arithmetic})", fix=f"use {-(-count // split) * split} devices{other}", field=name)
