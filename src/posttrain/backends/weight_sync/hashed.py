"""A wrapper of another sync that reports the hash of the weights at intervals, to compare runs and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.models.weight_transfer import manifest_of
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("hashed")
class HashedSync:
    """See interfaces.weight_sync.WeightSync. The hash covers the policy's tensors with Hugging Face names, an adapter merged into
    its layers; it reads every weight once."""

    def __init__(
        self,
        inner: WeightSync,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        every_steps: int,  # syncs of new weights; the first is always reported
        report: Callable[[str], None],
    ):
        self._inner = inner
        self._weights = weights
        self._every_steps = every_steps
        self._report = report
        self._synced: int | None = None  # version of the last sync
        self._count = 0  # of syncs of new weights
        self._reported = (-1, "")  # version and hash of the weights reported last

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        self._inner.publish(policy, rollout)
        version = policy.version
        if version == self._synced:
            return  # no update since the last sync
        self._synced = version
        if self._count % self._every_steps == 0:
            content_hash = manifest_of(self._weights(), version).content_hash
            text = f"the sampler's weights of version {version} have the hash {content_hash}"
            if content_hash == self._reported[1]:
                text += f", as those of version {self._reported[0]}: the updates in between changed nothing"
            self._report(text)
            self._reported = (version, content_hash)
        self._count += 1
