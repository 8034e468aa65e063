"""Copies of the sampler whose devices lie on several nodes: which engines have them, and how weights get there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from posttrain.config import RunConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import Problem
from posttrain.plan.placement import PlacementPlan, Rank, RolePlacement
from posttrain.plan.roles import place
from posttrain.registry import ROLLOUT_ENGINES

Copy = list[tuple[Rank, ...]]  # ranks by node, the first of the copy first


def copies_of(role: RolePlacement) -> list[Copy]:
    """Return the copies of a sampler."""
    size = role.devices_per_copy
    copies = [role.ranks[first : first + size] for first in range(0, len(role.ranks), size)]
    return [[tuple(of_node) for _, of_node in groupby(copy, key=lambda rank: rank.node)] for copy in copies]


def sync_over_nodes(engine: str) -> str:
    """Return the weight sync that reaches every process of a copy on several nodes: a broadcast to each of them, or for an engine
    that cannot receive one a folder that all nodes see (rollout.weight_folder, or the run's own)."""
    return "collective" if ROLLOUT_ENGINES.facts(engine).receives_broadcasts else "disk"


def sync_of(rollout: RolloutConfig, plan: PlacementPlan) -> str:
    """Return the weight sync of a run: the configured one, or where it leaves the choice open and a copy lies on several nodes,
    that which reaches all of them."""
    role = plan.role("rollout")
    if rollout.weight_sync != "auto" or role is None or all(len(copy) == 1 for copy in copies_of(role)):
        return rollout.weight_sync
    return sync_over_nodes(rollout.engine)


def unsupported_copies(rollout: RolloutConfig, plan: PlacementPlan, role: RolePlacement) -> Iterator[Problem]:
    """Yield why copies that lie on several nodes cannot be started."""
    spread = [copy for copy in copies_of(role) if len(copy) > 1]
    per_node = plan.devices_per_node
    if spread and not ROLLOUT_ENGINES.facts(rollout.engine).spans_nodes:
        able = " or ".join(ROLLOUT_ENGINES.stating("spans_nodes"))
        what = f"{_spread_out(role, plan)}, and {rollout.engine} has no such copies"
        fix = f"use rollout.engine={able}, or at most rollout.tensor_parallel={per_node}"
        yield Problem(what, fix=fix, field="rollout.tensor_parallel")
    for copy in spread:
        parts = [len(ranks) for ranks in copy]
        if len(set(parts)) > 1 or len({ranks[0].node for ranks in copy}) < len(copy):
            what = f"a copy of the sampler has {' and '.join(map(str, parts))} devices on its nodes, and each must have as many"
            fix = f"use at most rollout.tensor_parallel={per_node}, or as many devices of each node (rollout.devices)"
            yield Problem(what, fix=fix, field="rollout.tensor_parallel")
            return


def sync_problems(rollout: RolloutConfig, plan: PlacementPlan) -> Iterator[Problem]:
    """Yield a weight sync that reaches one of the nodes that a copy lies on."""
    role = plan.role("rollout")
    if role is None or rollout.weight_sync not in ("shared_memory", "adapter"):
        return
    if any(len(copy) > 1 for copy in copies_of(role)):
        what = f"{_spread_out(role, plan)}, and {rollout.weight_sync} reaches one of them"
        fix = f"use rollout.weight_sync={sync_over_nodes(rollout.engine)}"
        yield Problem(what, fix=fix, field="rollout.weight_sync")


def _spread_out(role: RolePlacement, plan: PlacementPlan) -> str:
    devices, per_node = role.devices_per_copy, plan.devices_per_node
    return f"a copy of the sampler has {devices} devices, which lie on more than one node ({per_node} on each)"


def copy_warnings(config: RunConfig) -> Iterator[str]:
    """Report copies of the sampler that lie on several nodes."""
    plan, _ = place(config)
    role = plan.role("rollout") if plan is not None and plan.runtime == "ray" else None
    if role is None or config.rollout.engine not in ROLLOUT_ENGINES.names():
        return
    nodes = max((len(copy) for copy in copies_of(role)), default=1)
    if nodes == 1 or not ROLLOUT_ENGINES.facts(config.rollout.engine).spans_nodes:
        return
    sync = config.rollout.weight_sync
    way = sync_over_nodes(config.rollout.engine) if sync == "auto" else sync
    yield (
        f"a copy of the sampler lies on {nodes} nodes: a server of {config.rollout.engine} on each of them, joined by its own "
        f"network, and weights by {way}; this was tried with servers that stand in for it, and not on two machines with GPUs"
    )
