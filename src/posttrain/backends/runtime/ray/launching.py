"""The processes of workers: launched by Ray, then supervised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.backends.runtime.ray.cluster import Cluster
from posttrain.backends.runtime.ray.role_groups import RoleGroup
from posttrain.backends.runtime.ray.watch import Member, Watch
from posttrain.backends.runtime.ray.worker import Worker
from posttrain.plan.placement import Rank


def launch(
    cluster: Cluster,
    reserved: Sequence[Any],
    group: RoleGroup,
    ranks: Sequence[Rank],
    *,
    gpus: Callable[[Rank], float],
    environment: Mapping[str, str],
) -> list[Any]:
    """Have Ray start a process for each of these ranks of a group. Returns: their handles, at once.

    Args: what ``cluster`` has reserved, by node; gpus, the share of its device that a rank takes.
    """
    handles = []
    for rank in ranks:
        here = reserved[rank.node]
        node = cluster.node_of(here)
        handle = cluster.spawn(
            Worker,
            (group.worker(rank), node, cluster.address_of(node)),
            group=here,
            bundle=rank.local_device,
            cpus=1,
            gpus=gpus(rank),
            environment=environment,
        )
        handles.append(handle)
    return handles


def supervised(
    cluster: Cluster,
    watch: Watch,
    group: RoleGroup,
    ranks: Sequence[Rank],
    handles: Sequence[Any],
    *,
    timeout_s: float,
    vital: bool = True,
) -> list[Member]:
    """Wait until launched processes run, and have them watched. Raises: RunStopped for one that does not start."""
    members = []
    for rank, handle in zip(ranks, handles, strict=True):
        name = group.worker(rank)
        member = Member(name=name, handle=handle, process=cluster.started(handle, name, timeout_s), vital=vital)
        watch.add(member)
        members.append(member)
    return members
