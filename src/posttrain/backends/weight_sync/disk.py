"""Weights through a folder that trainer and sampler both see: safetensors shards and their manifest."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Served, WeightTaker
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.weight_transfer import WeightsDiffer, write_folder
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("disk")
class DiskSync:
    """See interfaces.weight_sync.WeightSync. At most one version lies in the folder at a time."""

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],  # the policy's, as a Hugging Face checkpoint names them
        *,
        folder: Path,
        shard_bytes: int,
        beside: Callable[[Path], None] = lambda folder: (
            None
        ),  # writes config and tokenizer files, for servers that read them
        temporary: bool = False,  # the folder goes with the process
    ):
        self._weights = weights
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._beside = beside
        self.sent: Served | None = None
        if temporary:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def publish(self, policy: TrainEngine, rollout: WeightTaker) -> None:
        """Raises: RunStopped when the sampler finds other tensors than were sent, or serves other weights afterwards."""
        if self.sent is not None and self.sent.version == policy.version == rollout.version:
            return  # nothing was updated since
        target = self._folder / f"weights-{policy.version}"
        shutil.rmtree(target, ignore_errors=True)
        try:
            manifest = write_folder(target, self._weights(), policy.version, shard_bytes=self._shard_bytes)
            self._beside(target)
            announced = Served(manifest.version, manifest.content_hash)
            check_served(announced, rollout.load_folder(target, announced))
        except (WeightsDiffer, OSError) as error:
            raise RunStopped(f"the weights could not be sent through {target}: {error}") from error
        finally:
            shutil.rmtree(target, ignore_errors=True)
        rollout.weights_changed(policy.version)
        self.sent = announced
