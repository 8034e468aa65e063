"""Weight sync by broadcast from the trainer to the workers of one server, in flat buckets of bounded size (gloo or NCCL).

Every sync creates its own process group: that takes milliseconds (NCCL: about a second), and a restarted server has no old
group to join.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, Served, WeightTaker
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.weight_transfer import WeightsDiffer, join_group, manifest_of, send_buckets
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("collective")
class CollectiveSync:
    """See interfaces.weight_sync.WeightSync."""

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],  # the policy's, as a Hugging Face checkpoint names them
        *,
        backend: str = "gloo",  # nccl needs a separate GPU on either side
        address: str = "127.0.0.1",  # of this machine, as seen by the server
        workers: int = 1,  # of the server
        bucket_bytes: int,
        timeout_s: float = 300.0,  # for all to join, and for each bucket
    ):
        self._weights = weights
        self._backend = backend
        self._address = address
        self._workers = workers
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self.sent: Served | None = None

    @property
    def sent_bytes(self) -> int:
        return self.sent.nbytes if self.sent else 0

    def publish(self, policy: TrainEngine, rollout: WeightTaker) -> None:
        """Broadcast. Raises: RunStopped when a worker receives other tensors than were sent, or does not join."""
        if self.sent is not None and self.sent.version == policy.version == rollout.version:
            return  # no update since the last sync
        manifest = manifest_of(self._weights(), policy.version)
        announced = Served(manifest.version, manifest.content_hash, manifest.nbytes)
        plan = BroadcastPlan(
            backend=self._backend,
            address=self._address,
            port=_free_port(self._address),
            size=1 + self._workers,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            received = pool.submit(rollout.receive, manifest.to_json(), announced, plan)
            try:
                group = join_group(plan.backend, plan.address, plan.port, 0, plan.size, plan.timeout_s)
                send_buckets(group, self._weights(), manifest, self._bucket_bytes)
            except (RuntimeError, WeightsDiffer) as error:
                if received.done() and (cause := received.exception()):
                    raise RunStopped(f"the weights could not be broadcast: {cause}") from error
                raise RunStopped(f"the weights could not be broadcast: {error}") from error
            check_served(announced, received.result())
        rollout.weights_changed(policy.version)
        self.sent = announced


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
