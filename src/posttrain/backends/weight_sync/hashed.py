"""Around another sync: now and then the hash of the weights is told, so that runs and machines can be compared."""

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
    """See interfaces.weight_sync.WeightSync. The hash is of the policy's tensors as a Hugging Face checkpoint names them, an
    adapter merged into its layers; it reads every weight once."""

    def __init__(
        self,
        inner: WeightSync,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        every_steps: int,  # syncs of new weights; the first is told always
        tell: Callable[[str], None],
    ):
        self._inner = inner
        self._weights = weights
        self._every_steps = every_steps
        self._tell = tell
        self._synced: int | None = None  # version of the last sync
        self._count = 0  # of syncs of new weights
        self._told = (-1, "")  # version and hash of the weights that were told last

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        self._inner.publish(policy, rollout)
        version = policy.version
        if version == self._synced:
            return  # nothing was updated since
        self._synced = version
        if self._count % self._every_steps == 0:
            content_hash = manifest_of(self._weights(), version).content_hash
            text = f"the sampler's weights of version {version} have the hash {content_hash}"
            if content_hash == self._told[1]:
                text += f", as those of version {self._told[0]}: the updates between have changed nothing"
            self._tell(text)
            self._told = (version, content_hash)
        self._count += 1
