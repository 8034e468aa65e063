"""Rules for runs whose models live in worker processes of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.checks.rollout import rollout_problems
from posttrain.config.placement import PlacementConfig
from posttrain.config.roles import compares_vocabularies, runtime_of, shares_weights
from posttrain.config.rollout import RolloutConfig
from posttrain.config.served_model import REWARD_SERVER
from posttrain.errors import Problem
from posttrain.plan.checks.engines import unsupported_engines
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.sampler_copies import copies_of, sync_problems, unsupported_copies
from posttrain.registry import is_installed, missing_library


def cluster_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of the sampler, and of models on devices of their own, that contradict each other."""
    plan, _ = place(config)
    apart = plan is not None and sampler_is_apart(plan)
    yield from rollout_problems(config, apart=apart, with_workers=plan is not None and plan.runtime == "ray")
    if plan is None:
        return  # reported where placements are checked
    sync = config.rollout.weight_sync
    if shares_weights(config.rollout.engine) and apart and sync in ("in_memory", "disk", "adapter"):
        what = f"the sampler has devices of its own, and {sync} does not lead there"
        yield Problem(what, fix="use rollout.weight_sync=shared_memory or collective", field="rollout.weight_sync")
    if plan.runtime == "ray" and not shares_weights(config.rollout.engine):
        yield from sync_problems(config.rollout, plan)
    policy, reference = plan.role("policy"), plan.role("reference")
    if compares_vocabularies(config) and policy and reference and policy.devices != reference.devices:
        field = "loss.kl_estimator" if config.loss.kl_estimator == "full" else "reward.kl.estimator"
        what = f"{field}=full compares whole vocabularies, and the reference is on other devices than the policy"
        yield Problem(what, fix="use the policy's devices (reference.devices)", field="reference.devices")
    moves = config.reference.update_every is not None
    if moves and policy and reference and policy.devices != reference.devices:
        what = "reference.update_every mixes the policy's weights into the reference, which is on other devices"
        yield Problem(what, fix="use the policy's devices (reference.devices)", field="reference.devices")


def unsupported_cluster(config: TrainingConfig) -> list[Problem]:
    """Report valid settings that are planned, or whose library is not installed."""
    plan, _ = place(config)
    if plan is None:
        return []
    problems = list(unsupported_engines(config, in_process=plan.runtime == "inprocess"))
    if plan.runtime == "inprocess":
        return problems
    if isinstance(config, RunConfig):
        problems += _unsupported_samplers(config.rollout, plan)
        problems += _unsupported_reward_server(plan)
    if (config.placement.ray_address or "").startswith("ray://"):
        what = "ray:// drives a cluster from outside, and a run is driven from one of its machines"
        fix = "start it there, as with ray job submit, and use placement.ray_address=auto"
        problems.append(Problem(what, fix=fix, field="placement.ray_address"))
    if not is_installed("ray"):
        by = f"placement.runtime=ray, on {plan.devices} device{'s' * (plan.devices > 1)}"
        problems.append(replace(missing_library("ray", by), field="placement.devices"))
    return problems


def _unsupported_reward_server(plan: PlacementPlan) -> Iterator[Problem]:
    role = plan.role(REWARD_SERVER)
    if role is not None and any(len(copy) > 1 for copy in copies_of(role)):
        what = (
            f"a copy of the model that reward functions ask has {role.devices_per_copy} devices on more than one node"
        )
        fix = f"use at most reward.served.tensor_parallel={plan.devices_per_node}"
        yield Problem(what, fix=fix, field="reward.served.tensor_parallel")


def _unsupported_samplers(rollout: RolloutConfig, plan: PlacementPlan) -> Iterator[Problem]:
    engine, role = rollout.engine, plan.role("rollout")
    if shares_weights(rollout.engine):
        if rollout.tensor_parallel > 1:
            what = f"{engine} has a copy of the weights on each device, and cannot share one out"
            yield Problem(what, fix="use rollout.tensor_parallel=1", field="rollout.tensor_parallel")
        return
    if role is None or not role.ranks:
        return
    yield from unsupported_copies(rollout, plan, role)


def cluster_warnings(place: PlacementConfig) -> Iterator[str]:
    """Report settings that have no effect in one process."""
    if runtime_of(place) == "inprocess":
        for name in ("ray_address", "start_timeout_s", "call_timeout_s"):
            if getattr(place, name) != PlacementConfig.model_fields[name].default:
                yield f"placement.{name} has no effect: the run has one process (placement.runtime)"


def sampler_is_apart(plan: PlacementPlan) -> bool:
    """Return True when the sampler has workers of its own."""
    policy, rollout = plan.role("policy"), plan.role("rollout")
    return policy is not None and rollout is not None and bool(rollout.ranks) and rollout.devices != policy.devices
