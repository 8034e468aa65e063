"""The relays of a group of workers, as the driver starts and knows them; see relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.backends.runtime.ray.assignment import worker_environment
from posttrain.backends.runtime.ray.cluster import Cluster
from posttrain.backends.runtime.ray.relay import Relay
from posttrain.backends.runtime.ray.role_groups import RoleGroup
from posttrain.backends.runtime.ray.watch import Member, Watch

# Ranks of a group from which on its calls are passed on: of fewer they cost the driver less than another process the machine
FEWEST_RANKS = 32
# A relay's ranks at most, of whatever nodes: with 8 a call of a rank costs the driver three quarters of a direct one, with 64 a
# quarter
RANKS_OF_A_RELAY = 64


@dataclass(frozen=True, slots=True, eq=False)
class RankRelay:
    """A relay, and its ranks in the order of the handles that it has."""

    member: Member
    ranks: tuple[Member, ...]


def launch_relays(cluster: Cluster, group: RoleGroup, reserved: Sequence[Any]) -> list[Any]:
    """Have Ray start the relays of a large group whose ranks work together, each on the node of its first rank.

    Args: reserved, resources of each node. Returns: handles, at once.
    """
    if not group.together or len(group.ranks) < FEWEST_RANKS:
        return []
    handles = []
    for number, first in enumerate(group.ranks[::RANKS_OF_A_RELAY]):
        node = cluster.node_of(reserved[first.node])
        handles.append(
            cluster.spawn(
                Relay,
                (_name(group, number), node, cluster.address_of(node)),
                group=reserved[first.node],
                bundle=first.local_device,
                cpus=0,
                gpus=0,
                environment=worker_environment(1, False),
            )
        )
    return handles


def started_relays(
    cluster: Cluster,
    watch: Watch,
    group: RoleGroup,
    members: Sequence[Member],
    handles: Sequence[Any],
    timeout_s: float,
) -> tuple[RankRelay, ...]:
    """Wait for launched relays, supervise them and give them their ranks. Args: members of the group, one per rank.

    Raises: RunStopped.
    """
    relays = []
    for number, handle in enumerate(handles):
        own = tuple(members[number * RANKS_OF_A_RELAY : (number + 1) * RANKS_OF_A_RELAY])
        process = cluster.started(handle, _name(group, number), timeout_s)
        relay = Member(name=_name(group, number), handle=handle, process=process)
        watch.add(relay)
        relays.append(RankRelay(relay, own))
    asked = {
        each.member: cluster.call(each.member.handle, "take_ranks", [rank.handle for rank in each.ranks])
        for each in relays
    }
    watch.wait(asked, "starting relays", timeout_s)
    return tuple(relays)


def _name(group: RoleGroup, number: int) -> str:
    return f"{group.name} relay {number}"
