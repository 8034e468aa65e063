"""A LoRA adapter alone, through a folder of peft's, to a sampler that has loaded the base model itself.

The base is frozen, so the sampler's copy of it, read from the folder that the trainer read, stays right.
"""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Served, WeightTaker
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.weight_transfer import MANIFEST, WeightsDiffer, manifest_of
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("adapter")
class AdapterSync:
    """See interfaces.weight_sync.WeightSync. At most one version lies in the folder at a time."""

    def __init__(
        self,
        write: Callable[
            [Path], Mapping[str, Tensor]
        ],  # writes the adapter, and returns what it wrote by name in the file
        *,
        folder: Path,
        temporary: bool = False,  # the folder goes with the process
    ):
        self._write = write
        self._folder = folder
        self.sent: Served | None = None
        if temporary:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def publish(self, policy: TrainEngine, rollout: WeightTaker) -> None:
        """Raises: RunStopped when the sampler finds other tensors than were sent, or serves something else afterwards."""
        if self.sent is not None and self.sent.version == policy.version == rollout.version:
            return  # nothing was updated since
        target = self._folder / f"adapter-{policy.version}"
        shutil.rmtree(target, ignore_errors=True)
        try:
            target.mkdir(parents=True)
            manifest = manifest_of(self._write(target).items(), policy.version)
            (target / MANIFEST).write_text(manifest.to_json())
            announced = Served(manifest.version, manifest.content_hash)
            check_served(announced, rollout.load_adapter(target, announced))
        except (WeightsDiffer, OSError) as error:
            raise RunStopped(f"the adapter could not be sent through {target}: {error}") from error
        finally:
            shutil.rmtree(target, ignore_errors=True)
        rollout.weights_changed(policy.version)
        self.sent = announced
