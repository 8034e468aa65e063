"""Construction of a PlacementPlan from a configuration: devices, sharding and rest times of each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.config import RunConfig, TrainingConfig, TuneConfig
from posttrain.config.distillation import ROLE
from posttrain.config.judge import judge_field, judge_role
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import ONE_DEVICE, LearnerConfig
from posttrain.config.roles import (
    learner_of,
    needs_values,
    reference_is_policy,
    runtime_of,
    shares_weights,
    teachers_of,
    uses_reference,
)
from posttrain.config.served_model import REWARD_SERVER
from posttrain.errors import Problem
from posttrain.plan.engine import engine_options, engine_plan, is_split_as_policy, teacher_engine
from posttrain.plan.placement import GroupSizes, Phase, PlacementPlan, Rank, RolePlacement

TRAINING_ENGINES = (
    "policy",
    "critic",
    "reference",
    "reward model",
)  # roles that a training engine computes, besides teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role that the configuration requests, before it is placed."""

    role: str
    field: str  # the setting that names its devices
    engine: str
    devices: list[int] | None
    sizes: GroupSizes  # without data and shard, which follow from the devices
    awake: tuple[Phase, ...]
    rests: tuple[str, ...] = ()
    servers: int = 0  # that run outside of the run's devices


def place(config: TrainingConfig) -> tuple[PlacementPlan | None, list[Problem]]:
    """Place the roles of a run. Returns: the plan and no problem; or None and the problems, each with its arithmetic, the
    setting it comes from, and values that would work."""
    place = config.placement
    problems = _of_the_run(place)
    asked = _roles(config)
    for each in asked:
        problems += _problems(place, each)
    for each in asked:
        if _is_computed(each.role):
            ranks = place.devices if each.devices is None else len(each.devices)
            options = engine_options(config, each.role)
            problems += engine_plan(each.engine).option_problems(options, max(1, ranks), each.role)
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


def _roles(config: TrainingConfig) -> list[RoleRequest]:
    """List the roles of a run in the order in which a step needs them. Supervised fine-tuning has the policy and teachers."""
    if isinstance(config, RunConfig):
        return _roles_of_a_step(config)
    reference = [_reference(config)] if isinstance(config, TuneConfig) and uses_reference(config) else []
    return [*_teachers(config), _policy(config.policy, ("update",)), *reference]


def _teachers(config: TrainingConfig) -> list[RoleRequest]:
    found = []
    for role, teacher in teachers_of(config).items():
        engine = teacher_engine(config, role)
        as_policy = is_split_as_policy(config, role)
        found.append(
            RoleRequest(
                role=role,
                field=f"distillation.teachers.{role.removeprefix(ROLE)}.devices",
                engine=engine,
                devices=teacher.devices,
                sizes=engine_plan(engine).sizes(config.policy) if as_policy else GroupSizes(),
                awake=("log-probs",),
                rests=("weights",) if teacher.offload else (),
            )
        )
    return found


def _is_computed(role: str) -> bool:
    """Return True for a role that a training engine computes."""
    return role in TRAINING_ENGINES or role.startswith(ROLE)


def _policy(policy: LearnerConfig, awake: tuple[Phase, ...]) -> RoleRequest:
    return RoleRequest(
        role="policy",
        field="policy.devices",
        engine=policy.engine,
        devices=policy.devices,
        sizes=engine_plan(policy.engine).sizes(policy),
        awake=awake,
        rests=engine_plan(policy.engine).rests(policy),
    )


def _reference(config: RunConfig | TuneConfig) -> RoleRequest:
    return RoleRequest(
        role="reference",
        field="reference.devices",
        engine=config.policy.engine,
        devices=config.reference.devices,
        sizes=engine_plan(config.policy.engine).sizes(config.policy),
        awake=("log-probs",),
        rests=("weights",) if config.reference.offload else (),
    )


def _roles_of_a_step(config: RunConfig) -> list[RoleRequest]:
    policy, critic, rollout, reward = config.policy, config.critic, config.rollout, config.reward.model
    # The servers are not started by the run.
    elsewhere = not shares_weights(rollout.engine) and bool(rollout.endpoints)
    asked = [
        RoleRequest(
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
            RoleRequest(
                role="reward model",
                field="reward.model.devices",
                engine=reward.engine,
                devices=reward.devices,
                sizes=GroupSizes(),
                awake=("reward",),
            )
        )
    asked += [
        RoleRequest(
            role=judge_role(name),
            field=f"{judge_field(name)}.devices",
            engine=ONE_DEVICE,
            devices=judge.devices,
            sizes=GroupSizes(),
            awake=("reward",),
        )
        for name, judge in config.reward.judges.items()
    ]
    if (served := config.reward.served) is not None:
        asked.append(
            RoleRequest(
                role=REWARD_SERVER,
                field="reward.served.devices",
                engine=served.engine,
                devices=served.devices,
                sizes=GroupSizes(tensor=served.tensor_parallel),
                awake=("reward",),
            )
        )
    asked += _teachers(config)
    asked.append(_policy(policy, ("log-probs", "update")))
    if uses_reference(config):
        asked.append(_reference(config))
    if needs_values(config):
        asked.append(
            RoleRequest(
                role="critic",
                field="critic.devices",
                engine=critic.engine,
                devices=critic.devices,
                sizes=engine_plan(critic.engine).sizes(critic),
                awake=("values", "update"),
                rests=engine_plan(critic.engine).rests(critic),
            )
        )
    return asked


def _sampler_sizes(config: RunConfig) -> GroupSizes:
    options = config.rollout.engine_options
    pipeline = options.get("pipeline_parallel_size") or options.get("inference_engine_pipeline_parallel_size")
    return GroupSizes(
        tensor=config.rollout.tensor_parallel,
        pipeline=pipeline if isinstance(pipeline, int) and not isinstance(pipeline, bool) and pipeline > 0 else 1,
    )


def leaves(config: TrainingConfig, role: str) -> bool:
    """Tell whether the weights of a trained role leave its device while other roles work there."""
    section = learner_of(config, role)
    return "weights" in engine_plan(section.engine).rests(section)


def _sampler_rests(config: RunConfig) -> tuple[str, ...]:
    """vLLM's sleep leaves with weights and cache, SGLang's with the cache; native and hf hold a cache only while they sample."""
    rollout = config.rollout
    if shares_weights(rollout.engine):
        return ("cache",)
    if not rollout.engine_options.get("free_cache_engine"):
        return ()
    return {"vllm": ("weights", "cache"), "sglang": ("cache",)}.get(rollout.engine, ())


def _lender(config: TrainingConfig, asked: RoleRequest, where: dict[str, list[int]]) -> str | None:
    """The role whose weights this one reads where they are."""
    if not isinstance(config, RunConfig | TuneConfig):
        return None
    if isinstance(config, RunConfig) and asked.role == "rollout" and shares_weights(asked.engine):
        whole = engine_plan(config.policy.engine).keeps_whole and where["rollout"] == where["policy"]
        return "policy" if whole else None
    adapted = reference_is_policy(config)
    return "policy" if asked.role == "reference" and adapted and where["reference"] == where["policy"] else None


def _sizes(config: TrainingConfig, asked: RoleRequest, ranks: int) -> GroupSizes:
    sizes = asked.sizes
    shard = 1
    if _is_computed(asked.role):
        shard = engine_plan(asked.engine).shard(engine_options(config, asked.role), ranks)
    return replace(sizes, data=asked.servers or ranks // sizes.per_copy, shard=shard)


def _ranks(devices: Sequence[int], per_node: int) -> tuple[Rank, ...]:
    return tuple(
        Rank(rank=rank, device=device, node=device // per_node, local_device=device % per_node)
        for rank, device in enumerate(devices)
    )


def _problems(place: PlacementConfig, asked: RoleRequest) -> list[Problem]:
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
    return engine_plan(asked.engine).group_problems(asked.sizes, count, role=role, section=_sizes_of(role))


def _sizes_of(role: str) -> str:
    """Return the section with a role's sizes; reference and teachers have the policy's."""
    if role == REWARD_SERVER:
        return "reward.served"
    return "policy" if role == "reference" or role.startswith(ROLE) else role


def _does_not_split(asked: RoleRequest, count: int, split: int) -> Problem:
    role, sizes = asked.role, asked.sizes
    owner = _sizes_of(role)
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
    name, size = max(product, key=lambda part: part[1])
    fits = [smaller for smaller in range(min(size, count), 0, -1) if count % (split // size * smaller) == 0]
    other = f", or {name}={fits[0]}" if fits else ""
    return Problem(f"{what}({arithmetic})", fix=f"use {-(-count // split) * split} devices{other}", field=name)
