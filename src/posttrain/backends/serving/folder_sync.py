"""Common part of weight syncs through a folder shared by trainer and sampler, which holds at most one version at a time."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Served, WeightTaker
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.weight_transfer import Manifest, WeightsDiffer

Write = Callable[[Path, int], Manifest]  # writes a version's files into an existing, empty folder
Load = Callable[[WeightTaker, Path, Served], list[tuple[str, Served]]]


class FolderSync:
    """See interfaces.weight_sync.WeightSync.

    Args: ``what`` is transferred, for names and messages; ``temporary``: the folder is deleted with the process.
    """

    def __init__(self, what: str, write: Write, load: Load, *, folder: Path, temporary: bool):
        self.what = what
        self._write = write
        self._load = load
        self._folder = folder
        self.sent: Served | None = None
        if temporary:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)

    @property
    def sent_bytes(self) -> int:
        return self.sent.nbytes if self.sent else 0

    def publish(self, policy: TrainEngine, rollout: WeightTaker) -> None:
        """Publish. Raises: RunStopped when the sampler finds other tensors than were sent, or serves others afterwards."""
        if self.sent is not None and self.sent.version == policy.version == rollout.version:
            return  # no update since the last sync
        target = self._folder / f"{self.what}-{policy.version}"
        shutil.rmtree(target, ignore_errors=True)
        try:
            target.mkdir(parents=True)
            manifest = self._write(target, policy.version)
            announced = Served(manifest.version, manifest.content_hash, manifest.nbytes)
            check_served(announced, self._load(rollout, target, announced))
        except (WeightsDiffer, OSError) as error:
            raise RunStopped(f"the {self.what} could not be sent through {target}: {error}") from error
        finally:
            shutil.rmtree(target, ignore_errors=True)
        rollout.weights_changed(policy.version)
        self.sent = announced
