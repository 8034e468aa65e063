"""The policy's weights on their way to samplers in workers. Digests of every tensor are taken where it leaves and arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from posttrain.backends.runtime.ray.crew import Crew
from posttrain.backends.runtime.ray.rollout import RemoteRollout
from posttrain.backends.runtime.ray.watch import Member, WorkerLost
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import RolloutEngine, Served
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served

Send = Callable[[Crew, Sequence[Member], int, int], Served]


class SharedSync:
    """For samplers in the trainers' processes: each takes what all gather, or reads the policy's own tensors."""

    def __init__(self, crew: Crew):
        self._crew = crew
        self._sent: Served | None = None

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """See interfaces.weight_sync.WeightSync."""
        version = policy.version
        if self._sent is not None and self._sent.version == version == rollout.version:
            return  # nothing was updated since
        found: list[tuple[Served, Served] | None] = self._crew.each("share_weights", version, what="weight sync")
        moved = [(member.name, pair) for member, pair in zip(self._crew.members, found, strict=True) if pair]
        if moved:
            self._sent = moved[0][1][0]
            check_served(self._sent, [(name, arrived) for name, (_, arrived) in moved])
        rollout.weights_changed(version)


class SeparateSync:
    """For samplers in workers of their own. ``send`` is one of the functions below."""

    def __init__(self, trainers: Crew, send: Send, bucket_bytes: int):
        self._trainers = trainers
        self._send = send
        self._bucket_bytes = bucket_bytes
        self._sent: Served | None = None

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """See interfaces.weight_sync.WeightSync. A sampler that is lost meanwhile is replaced, once."""
        assert isinstance(rollout, RemoteRollout)
        version = policy.version
        if self._sent is not None and self._sent.version == version == rollout.version:
            return  # nothing was updated since
        rollout.mend(send=False)
        try:
            self._sent = self._send(self._trainers, rollout.crew.members, version, self._bucket_bytes)
        except WorkerLost as loss:
            if loss.member.vital:
                raise
            rollout.replace(loss.member, send=False)
            self._sent = self._send(self._trainers, rollout.crew.members, version, self._bucket_bytes)
        rollout.weights_changed(version)

    def send_to(self, member: Member) -> None:
        """Give a sampler that was just started what the others have. Raises: RunStopped when that has changed."""
        if self._sent is None:
            return  # before the first publish
        served = self._send(self._trainers, [member], self._sent.version, self._bucket_bytes)
        check_served(self._sent, [(member.name, served)])


def through_shared_memory(trainers: Crew, samplers: Sequence[Member], version: int, bucket_bytes: int) -> Served:
    """Flat buckets in Ray's object store: shared memory on a node, which Ray copies to a node that has not got it yet.

    The driver hands on promises and never sees the bytes. While samplers take a bucket, the next one is gathered.
    Returns what every sampler serves. Raises: WorkerLost; RunStopped when something else has arrived than was sent.
    """
    cluster, watch = trainers.cluster, trainers.watch
    count = trainers.call("begin_sending", bucket_bytes, what="weight sync")
    taking: dict[Member, Any] = {}
    gathering: dict[Member, Any] = {}
    try:
        for _ in range(count):
            gathering = {
                member: cluster.call(member.handle, "call", "next_bucket", rank == 0)
                for rank, member in enumerate(trainers.members)
            }
            bucket = gathering[trainers.members[0]]
            watch.wait(taking, "weight sync", trainers.timeout_s)
            taking = {member: cluster.call(member.handle, "call", "take_bucket", True, bucket) for member in samplers}
        watch.wait(taking, "weight sync", trainers.timeout_s)
    except WorkerLost as loss:
        if not loss.member.vital:
            watch.wait(gathering, "weight sync", trainers.timeout_s)  # until the trainers are through with their part
        raise
    announced: Served = trainers.call("finish_sending", version, what="weight sync")
    return _served(trainers, samplers, announced)


def by_broadcast(trainers: Crew, samplers: Sequence[Member], version: int, bucket_bytes: int) -> Served:
    """Flat buckets from the trainers' rank 0 to all samplers by a collective: gloo on CPUs, NCCL on GPUs.

    The group is made anew every time. Returns and raises as ``through_shared_memory``.
    """
    cluster, watch, first = trainers.cluster, trainers.watch, trainers.members[0]
    manifest: str = trainers.call("list_weights", version, what="weight sync")
    port = watch.wait({first: cluster.call(first.handle, "free_port")}, "weight sync", trainers.timeout_s)[first]
    meeting, size = (first.process.host, port), 1 + len(samplers)
    sending = {
        member: cluster.call(member.handle, "call", "broadcast", True, manifest, meeting, size, bucket_bytes)
        for member in trainers.members
    }
    receiving = {
        member: cluster.call(member.handle, "call", "receive", True, manifest, meeting, rank, size, bucket_bytes)
        for rank, member in enumerate(samplers, start=1)
    }
    try:
        watch.wait(sending | receiving, "weight sync", trainers.timeout_s)
    except WorkerLost as loss:
        if not loss.member.vital:
            watch.remove(loss.member)  # a stopped one would hold up the others
            for promises in (sending, {m: p for m, p in receiving.items() if m is not loss.member}):
                with suppress(RuntimeError):  # they fail for its sake
                    watch.wait(promises, "weight sync", trainers.timeout_s)
        raise
    announced: Served = trainers.call("announce", manifest, what="weight sync")
    return _served(trainers, samplers, announced)


def _served(trainers: Crew, samplers: Sequence[Member], announced: Served) -> Served:
    promises = {
        member: trainers.cluster.call(member.handle, "call", "finish_taking", True, announced.version)
        for member in samplers
    }
    found = trainers.watch.wait(promises, "weight sync", trainers.timeout_s)
    check_served(announced, [(member.name, served) for member, served in found.items()])
    return announced


SENDS: dict[str, Send] = {"shared_memory": through_shared_memory, "collective": by_broadcast}


def send_of(name: str) -> Send:
    """Raises: RunStopped for a way that does not lead to samplers in workers."""
    known = {"auto": "shared_memory"}.get(name, name)
    if known not in SENDS:
        raise RunStopped(f"rollout.weight_sync={name} does not lead to samplers in workers; use {', '.join(SENDS)}")
    return SENDS[known]
