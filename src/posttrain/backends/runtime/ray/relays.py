"""The relays of a group of workers, as the driver starts and knows them; see relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.backends.runtime.ray.assignment import worker_environment
from posttrain.backends.runtime.ray.cluster import Cluster
from posttrain.backends.runtime.ray.relay import Relay
from posttrain.backends.runtime.ray.role_groups import RoleGroup
from posttrain.backends.runtime.ray.watch import Member, Watch

# Ranks of a group from which on its calls are passed on: of fewer they cost the driver less than another process the machine
FEWEST_RANKS = 32


@dataclass(frozen=True, slots=True, eq=False)
class NodeRelay:
    """A relay, and the ranks of its node in the order of the handles that it has."""

    member: Member
    ranks: tuple[Member, ...]


def launch_relays(cluster: Cluster, group: RoleGroup, reserved: Sequence[Any]) -> dict[int, Any]:
    """Have Ray start a relay on every node of a large group whose ranks work together. Args: reserved, resources of each node.

    Returns: handles by the number of the node, at once.
    """
    if not group.together or len(group.ranks) < FEWEST_RANKS:
        return {}
    first = {rank.node: rank for rank in reversed(group.ranks)}
    handles = {}
    for number in sorted(first):
        node = cluster.node_of(reserved[number])
        handles[number] = cluster.spawn(
            Relay,
            (_name(group, number), node, cluster.address_of(node)),
            group=reserved[number],
            bundle=first[number].local_device,
            cpus=0,
            gpus=0,
            environment=worker_environment(1, False),
        )
    return handles


def started_relays(
    cluster: Cluster,
    watch: Watch,
    group: RoleGroup,
    members: Sequence[Member],
    handles: Mapping[int, Any],
    timeout_s: float,
) -> tuple[NodeRelay, ...]:
    """Wait for launched relays, supervise them and give them their ranks. Args: members of the group.

    Raises: RunStopped.
    """
    relays = []
    for number, handle in handles.items():
        own = tuple(member for rank, member in zip(group.leading, members, strict=True) if rank.node == number)
        process = cluster.started(handle, _name(group, number), timeout_s)
        relay = Member(name=_name(group, number), handle=handle, process=process)
        watch.add(relay)
        relays.append(NodeRelay(relay, own))
    asked = {each.member: _give_ranks(cluster, each) for each in relays}
    watch.wait(asked, "starting relays", timeout_s)
    return tuple(relays)


def _give_ranks(cluster: Cluster, relay: NodeRelay) -> Any:
    return cluster.call(relay.member.handle, "take_ranks", [each.handle for each in relay.ranks])


def _name(group: RoleGroup, node: int) -> str:
    return f"{group.name} relay of node {node}"
