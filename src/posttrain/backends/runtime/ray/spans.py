"""Copies of the sampler whose devices lie on several machines: who has which part, and how weights get there."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.backends.runtime.ray.watch import Member, Watch
from posttrain.config import RunConfig, TrainingConfig
from posttrain.interfaces.rollout_engine import NodeSpan
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.sampler_copies import sync_of


def with_reaching_sync(config: TrainingConfig, plan: PlacementPlan) -> TrainingConfig:
    """The configuration with a weight sync that reaches all machines of a copy, where it leaves the choice open."""
    if not isinstance(config, RunConfig):
        return config
    chosen = config.rollout.model_copy(update={"weight_sync": sync_of(config.rollout, plan)})
    return config.model_copy(update={"rollout": chosen})


def places_of(member: Member, followers: Sequence[Member], watch: Watch) -> list[tuple[Member, NodeSpan | None]]:
    """A sampler's worker and those on further machines of its copy, each with its place among them; None where there is one."""
    if not followers:
        return [(member, None)]
    together, address, port = [member, *followers], member.process.host, watch.free_port(member)
    return [
        (each, NodeSpan(nodes=len(together), rank=rank, address=address, port=port, host=each.process.host))
        for rank, each in enumerate(together)
    ]
