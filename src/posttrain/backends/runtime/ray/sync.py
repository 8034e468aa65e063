"""Weight syncs from the trainers to the samplers. Every tensor is hashed where it is sent and where it is received."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.backends.runtime.ray.rollout import RemoteRollout
from posttrain.backends.runtime.ray.watch import Member, WorkerLost
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import RolloutEngine, Served
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served

WHAT = "weight sync"  # for messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Arguments of the functions that send weights."""

    bucket_bytes: int
    folder: Path  # shared by trainers and samplers
    ranks_per_sampler: int = 1  # of a broadcast: processes of a sampler that receive
    adapter: str = (
        ""  # adapter_config.json of a LoRA adapter that is sent without its base model; "": all weights are sent
    )


Send = Callable[[WorkerGroup, Sequence[Member], int, Way], Served]


class SharedSync:
    """Weight sync of samplers in the trainers' processes: each takes gathered weights, or reads the policy's own tensors."""

    def __init__(self, workers: WorkerGroup):
        self._workers = workers
        self._sent: Served | None = None

    @property
    def sent_bytes(self) -> int:
        return self._sent.nbytes if self._sent else 0

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """See interfaces.weight_sync.WeightSync."""
        version = policy.version
        if self._sent is not None and self._sent.version == version == rollout.version:
            return  # nothing was updated since
        found: list[tuple[Served, Served] | None] = self._workers.each("share_weights", version, what=WHAT)
        moved = [(member.name, pair) for member, pair in zip(self._workers.members, found, strict=True) if pair]
        if moved:
            self._sent = moved[0][1][0]
            check_served(self._sent, [(name, arrived) for name, (_, arrived) in moved])
        rollout.weights_changed(version)


class SeparateSync:
    """Weight sync to samplers in workers of their own. ``send`` is one of the functions below."""

    def __init__(self, trainers: WorkerGroup, send: Send, way: Way):
        self._trainers = trainers
        self._send = send
        self._way = way
        self._sent: Served | None = None

    @property
    def sent_bytes(self) -> int:
        return self._sent.nbytes if self._sent else 0

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """See interfaces.weight_sync.WeightSync. A sampler that is lost during the sync is replaced once."""
        assert isinstance(rollout, RemoteRollout)
        version = policy.version
        current = self._sent is not None and self._sent.version == version == rollout.version
        if current and rollout.is_whole:
            return  # nothing was updated since
        rollout.mend(send=False)
        try:
            self._sent = self._send(self._trainers, rollout.workers.members, version, self._way)
        except WorkerLost as loss:
            if loss.member.vital:
                raise
            rollout.replace(loss.member, send=False)
            self._sent = self._send(self._trainers, rollout.workers.members, version, self._way)
        rollout.weights_changed(version)

    def send(self, members: Sequence[Member], version: int) -> Served:
        """Send the policy's weights to these samplers. Raises: WorkerLost for one that is lost meanwhile."""
        self._sent = self._send(self._trainers, members, version, self._way)
        return self._sent

    def send_to(self, member: Member) -> None:
        """Send a new sampler the weights that the others have. Raises: RunStopped when the policy has changed since."""
        if self._sent is None:
            return  # before the first publish
        served = self._send(self._trainers, [member], self._sent.version, self._way)
        check_served(self._sent, [(member.name, served)])


def through_shared_memory(trainers: WorkerGroup, samplers: Sequence[Member], version: int, way: Way) -> Served:
    """Send flat buckets through Ray's object store: shared memory within a node, a copy per further node.

    The driver hands on promises and never sees the bytes. While samplers take a bucket, the next one is gathered.
    Returns what every sampler serves. Raises: WorkerLost; RunStopped when something else has arrived than was sent.
    """
    cluster, watch = trainers.cluster, trainers.watch
    count = trainers.call("sender.begin", way.bucket_bytes, what=WHAT)
    taking: dict[Member, Any] = {}
    gathering: dict[Member, Any] = {}
    try:
        for _ in range(count):
            gathering = {
                member: cluster.call(member.handle, "call", "sender.next_bucket", rank == 0)
                for rank, member in enumerate(trainers.members)
            }
            bucket = gathering[trainers.members[0]]
            watch.wait(taking, WHAT, trainers.timeout_s)
            taking = {
                member: cluster.call(member.handle, "call", "taker.take_bucket", True, bucket) for member in samplers
            }
        watch.wait(taking, WHAT, trainers.timeout_s)
    except WorkerLost as loss:
        if not loss.member.vital:
            watch.wait(gathering, WHAT, trainers.timeout_s)  # until the trainers have sent their part
        raise
    announced: Served = trainers.call("sender.finish", version, what=WHAT)
    return _all_serve(trainers, samplers, announced, "taker.finish", version, way.adapter)


def by_broadcast(trainers: WorkerGroup, samplers: Sequence[Member], version: int, way: Way) -> Served:
    """Broadcast flat buckets from the trainers' rank 0 to all processes of the samplers: gloo on CPUs, NCCL on GPUs.

    The group is created for every sync. Returns and raises as ``through_shared_memory``.
    """
    cluster, watch, first = trainers.cluster, trainers.watch, trainers.members[0]
    manifest: str = trainers.call("sender.manifest", version, what=WHAT)
    port = watch.free_port(first)
    each = way.ranks_per_sampler
    meeting, size = (first.process.host, port), 1 + each * len(samplers)
    sending = {
        member: cluster.call(member.handle, "call", "sender.broadcast", True, manifest, meeting, size, way.bucket_bytes)
        for member in trainers.members
    }
    receiving = {
        member: cluster.call(
            member.handle, "call", "taker.receive", True, manifest, meeting, 1 + each * number, size, way.bucket_bytes
        )
        for number, member in enumerate(samplers)
    }
    try:
        watch.wait(sending | receiving, WHAT, trainers.timeout_s)
    except WorkerLost as loss:
        if not loss.member.vital:
            watch.remove(loss.member)  # a stopped process would block the others
            for promises in (sending, {m: p for m, p in receiving.items() if m is not loss.member}):
                with suppress(RuntimeError):  # the others fail because it is gone
                    watch.wait(promises, WHAT, trainers.timeout_s)
        raise
    announced: Served = trainers.call("sender.announced", manifest, what=WHAT)
    return _all_serve(trainers, samplers, announced, "taker.finish", version)


def through_a_folder(trainers: WorkerGroup, samplers: Sequence[Member], version: int, way: Way) -> Served:
    """Write files on the trainers' rank 0 that every sampler reads. Returns and raises as ``through_shared_memory``."""
    with written(trainers, version, way) as (folder, announced):
        return _all_serve(trainers, samplers, announced, "taker.load", folder, announced)


@contextmanager
def written(trainers: WorkerGroup, version: int, way: Way) -> Iterator[tuple[Path, Served]]:
    """Have the weights written to a folder, which is removed at the end. Yields: the folder and their version and hash."""
    folder = way.folder / f"weights-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder, trainers.call("sender.write", folder, version, way.bucket_bytes, what=WHAT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _all_serve(
    trainers: WorkerGroup, samplers: Sequence[Member], announced: Served, method: str, *arguments: Any
) -> Served:
    promises = {member: trainers.cluster.call(member.handle, "call", method, True, *arguments) for member in samplers}
    found = trainers.watch.wait(promises, WHAT, trainers.timeout_s)
    check_served(announced, [(member.name, served) for member, served in found.items()])
    return announced


SENDS: dict[str, Send] = {
    "shared_memory": through_shared_memory,
    "collective": by_broadcast,
    "disk": through_a_folder,
}


def send_of(name: str) -> Send:
    """Look up a weight sync for samplers in workers. Raises: RunStopped for one that has no such form."""
    known = {"auto": "shared_memory", "adapter": "shared_memory"}.get(name, name)
    if known not in SENDS:
        raise RunStopped(f"rollout.weight_sync={name} does not lead to samplers in workers; use {', '.join(SENDS)}")
    return SENDS[known]
