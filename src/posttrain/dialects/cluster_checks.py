"""Rules for runs whose models live in worker processes of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.dialects.run_checks import PLANNED_TRAIN_ENGINES
from posttrain.errors import Problem
from posttrain.placement.plan import PlacementPlan
from posttrain.placement.roles import SHARING, learner_of, place, runtime_of
from posttrain.registry import is_installed, missing_library


def cluster_problems(config: RunConfig) -> Iterator[Problem]:
    """What contradicts itself."""
    plan, _ = place(config)
    if plan is None:
        return  # told where placements are checked
    sync, apart = config.rollout.weight_sync, sampler_is_apart(plan)
    if config.rollout.engine in SHARING and apart and sync in ("in_memory", "disk", "adapter"):
        what = f"the sampler has devices of its own, and {sync} does not lead there"
        yield Problem(what, fix="use rollout.weight_sync=shared_memory or collective", field="rollout.weight_sync")
    policy, reference = plan.role("policy"), plan.role("reference")
    whole = config.loss.kl_coef > 0 and config.loss.kl_estimator == "full"
    if whole and policy and reference and policy.devices != reference.devices:
        what = (
            "loss.kl_estimator=full compares whole vocabularies, and the reference is on other devices than the policy"
        )
        yield Problem(what, fix="use the policy's devices (reference.devices)", field="reference.devices")


def unbuilt_cluster(config: TrainingConfig) -> list[Problem]:
    """What is right to ask for and planned, and what is not installed."""
    plan, _ = place(config)
    if plan is None:
        return []
    engines = {role: learner_of(config, role).engine for role in ("policy", "critic") if plan.role(role)}
    problems = [
        Problem(f"{name} is planned; this version cannot run it", fix="use fsdp, or local", field=f"{role}.engine")
        for role, name in engines.items()
        if name in PLANNED_TRAIN_ENGINES
    ]
    if plan.runtime == "inprocess":
        problems += [
            Problem(
                f"fsdp shares the {role} out over worker processes, and placement.runtime=inprocess has none",
                fix="use placement.runtime=ray, or local",
                field=f"{role}.engine",
            )
            for role, name in engines.items()
            if name == "fsdp"
        ]
        return problems
    if isinstance(config, RunConfig):
        problems += _unbuilt_samplers(config.rollout)
    if (config.placement.ray_address or "").startswith("ray://"):
        what = "ray:// drives a cluster from outside, and a run is driven from one of its machines"
        fix = "start it there, as with ray job submit, and use placement.ray_address=auto"
        problems.append(Problem(what, fix=fix, field="placement.ray_address"))
    if not is_installed("ray"):
        by = f"placement.runtime=ray, on {plan.devices} device{'s' * (plan.devices > 1)}"
        problems.append(replace(missing_library("ray", by), field="placement.devices"))
    return problems


def _unbuilt_samplers(rollout: RolloutConfig) -> Iterator[Problem]:
    if rollout.engine not in SHARING:
        what = f"rollout.engine={rollout.engine} with workers of Ray is planned; this version samples in its workers"
        yield Problem(what, fix="use native, or hf", field="rollout.engine")
    elif rollout.tensor_parallel > 1:
        what = f"{rollout.engine} has a copy of the weights on each device, and cannot share one out"
        yield Problem(what, fix="use rollout.tensor_parallel=1", field="rollout.tensor_parallel")


def cluster_warnings(place: PlacementConfig) -> Iterator[str]:
    """What has no effect in one process."""
    if runtime_of(place) == "inprocess":
        for name in ("ray_address", "start_timeout_s", "call_timeout_s"):
            if getattr(place, name) != PlacementConfig.model_fields[name].default:
                yield f"placement.{name} has no effect: the run has one process (placement.runtime)"


def sampler_is_apart(plan: PlacementPlan) -> bool:
    """Whether the sampler has workers of its own."""
    policy, rollout = plan.role("policy"), plan.role("rollout")
    return policy is not None and rollout is not None and bool(rollout.ranks) and rollout.devices != policy.devices
