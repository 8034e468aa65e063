"""New weights on their way from a sharded policy to K copies of the sampler: the bytes of every link, and the seconds.

W bytes of weights, a policy whose copy lies on S devices. The driver sees none of them:

    gather              W (S - 1) / S to every device of a copy, of which the first sends
    shared_memory       from it to its node's memory W, to each other node with samplers W, from there to each copy W; a bucket
                        of weights is gathered while the one before it is taken, so the slower of the two counts
    collective          W over every link of the broadcast, which begins when a bucket is gathered; also what `auto` is where a
                        copy of the sampler lies on several nodes, none of which shared memory could leave out
    disk                W written by the first device, and read by each copy; a disk's seconds are not counted
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import RunConfig
from posttrain.config.machine import MachineConfig
from posttrain.config.roles import shares_weights
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.plan.sampler_copies import sync_of
from posttrain.plan.step_traffic import sent_weights

GIGA, MICRO, MIB = 1e9, 1e-6, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Links that carry equally many bytes at the same time."""

    what: str
    count: int
    bytes: int  # over each of them
    seconds: float | None  # None: the machine file does not say how fast it is


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncTime:
    """A weight sync. Its seconds are those of its links, as far as they follow one another, and of its messages."""

    links: tuple[Link, ...] = ()
    seconds: float = 0.0


def weight_sync_time(
    config: RunConfig, plan: PlacementPlan, shape: ModelShape, machine: MachineConfig
) -> WeightSyncTime:
    """Compute the links of a weight sync, none where the sampler reads the policy's own weights or is outside of the run."""
    policy, rollout = plan.role("policy"), plan.role("rollout")
    assert policy is not None and rollout is not None, "every run has both"
    if rollout.uses_weights_of or not rollout.ranks:
        return WeightSyncTime()
    size = sent_weights(config, shape)
    buckets = max(1, -(-size // (config.rollout.weight_bucket_mib * MIB)))
    waits = buckets * machine.latency_us * MICRO
    held_by = policy.sizes.shard * policy.sizes.tensor * policy.sizes.pipeline
    across = _network(machine) if _crosses_nodes(policy, held_by) else machine.link_gb_s
    gather = _link(machine, "gather", len(policy.ranks), size * (held_by - 1) // held_by, across)
    gathers, gathering = ((gather,), gather.seconds or 0.0) if held_by > 1 else ((), 0.0)
    if rollout.devices == policy.devices and shares_weights(rollout.engine):
        return WeightSyncTime(links=gathers, seconds=gathering + waits if gathers else 0.0)
    source = policy.ranks[0].node
    nodes = {rank.node for rank in rollout.ranks}
    copies = len(rollout.ranks) // rollout.devices_per_copy
    sync = sync_of(config.rollout, plan)
    if sync == "collective":
        apart = nodes | {source} != {source}
        slowest = _network(machine) if apart else machine.link_gb_s
        send = _link(machine, "broadcast", len(rollout.ranks), size, slowest)
        return WeightSyncTime(links=(*gathers, send), seconds=gathering + (send.seconds or 0.0) + waits)
    out = _link(machine, "first device to its node's memory", 1, size, machine.host_gb_s)
    if sync == "disk":
        write = Link(what="first device to the folder", count=1, bytes=size, seconds=None)
        read = Link(what="folder to each copy", count=copies, bytes=size, seconds=None)
        return WeightSyncTime(links=(*gathers, write, read), seconds=gathering + waits)
    into = _link(machine, "a node's memory to a copy on it", copies, size, machine.host_gb_s)
    others = len(nodes - {source})
    on = _link(machine, "out of the first node, at most", 1, size * others, _network(machine))
    sends = (out, *((on,) if others else ()), into)
    giving = gathering + (out.seconds or 0.0)
    taking = (on.seconds or 0.0) + (into.seconds or 0.0)
    # The first bucket is waited for, and then one side waits for the other
    seconds = max(giving, taking) + min(giving, taking) / buckets
    return WeightSyncTime(links=(*gathers, *sends), seconds=seconds + waits)


def broadcast_time(
    config: RunConfig, plan: PlacementPlan, shape: ModelShape, machine: MachineConfig
) -> WeightSyncTime | None:
    """Compute the links of a broadcast instead of shared memory; None where weights go another way, or it would be no way."""
    rollout = config.rollout
    by_memory = sync_of(rollout, plan) in ("auto", "shared_memory")
    if not by_memory or rollout.engine in ("sglang", "http") or config.policy.lora:
        return None
    other = rollout.model_copy(update={"weight_sync": "collective"})
    return weight_sync_time(config.model_copy(update={"rollout": other}), plan, shape, machine)


def _link(machine: MachineConfig, what: str, count: int, size: int, gb_s: float) -> Link:
    return Link(what=what, count=count, bytes=size, seconds=size / (gb_s * GIGA * machine.attained.links))


def _network(machine: MachineConfig) -> float:
    return machine.network_gb_s or machine.link_gb_s


def _crosses_nodes(policy: RolePlacement, held_by: int) -> bool:
    """Tell whether a copy of the policy lies on several nodes."""
    axes = [axis for axis in ("shard", "tensor", "pipeline") if getattr(policy.sizes, axis) > 1]
    nodes = [rank.node for rank in policy.ranks]
    groups = [group for axis in axes for group in policy.groups(axis)]  # type: ignore[arg-type]
    return held_by > 1 and any(len({nodes[rank] for rank in group}) > 1 for group in groups)
