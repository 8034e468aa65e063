"""Servers that run already: this process speaks to them, and the trainers' workers send them the weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from posttrain.backends.runtime.ray.sync import WHAT, Way, written
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, Served, WeightTaker
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served


class EndpointSync:
    """See interfaces.weight_sync.WeightSync. Through a folder that the servers see, or (``backend``: gloo, nccl) by a broadcast
    from the trainers' rank 0 to the processes of the one server."""

    def __init__(self, trainers: WorkerGroup, way: Way, *, backend: str | None = None):
        self._trainers = trainers
        self._way = way
        self._backend = backend
        self._sent: Served | None = None

    @property
    def sent_bytes(self) -> int:
        return self._sent.nbytes if self._sent else 0

    def publish(self, policy: TrainEngine, rollout: WeightTaker) -> None:
        version = policy.version
        if self._sent is not None and self._sent.version == version == rollout.version:
            return  # nothing was updated since
        self._sent = self._broadcast(rollout, version) if self._backend else self._through_a_folder(rollout, version)
        rollout.weights_changed(version)

    def _through_a_folder(self, rollout: WeightTaker, version: int) -> Served:
        with written(self._trainers, version, self._way) as (folder, announced):
            load = rollout.load_adapter if self._way.adapter else rollout.load_folder
            check_served(announced, load(folder, announced))
        return announced

    def _broadcast(self, rollout: WeightTaker, version: int) -> Served:
        trainers, first = self._trainers, self._trainers.members[0]
        bucket_bytes = self._way.bucket_bytes
        manifest: str = trainers.call("sender.manifest", version, what=WHAT)
        announced: Served = trainers.call("sender.announced", manifest, what=WHAT)
        port = trainers.watch.free_port(first)
        plan = BroadcastPlan(
            backend=self._backend or "gloo",
            address=first.process.host,
            port=port,
            size=1 + self._way.ranks_per_sampler,
            bucket_bytes=bucket_bytes,
            timeout_s=trainers.timeout_s,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            received = pool.submit(rollout.receive, manifest, announced, plan)
            try:
                trainers.each("sender.broadcast", manifest, (plan.address, port), plan.size, bucket_bytes, what=WHAT)
            except RuntimeError as error:
                cause = received.exception() if received.done() else None
                raise RunStopped(f"the weights could not be broadcast: {cause or error}") from error
            check_served(announced, received.result())
        return announced
