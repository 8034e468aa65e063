"""Weight sync of a LoRA adapter only, through a peft folder, to a sampler that has loaded the base model itself.

The base is frozen, so the sampler's copy, read from the same folder as the trainer's, stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from posttrain.backends.serving.folder_sync import FolderSync
from posttrain.models.weight_transfer import MANIFEST, Manifest, manifest_of
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("adapter")
def adapter_sync(write: Callable[[Path], Mapping[str, Tensor]], *, folder: Path, temporary: bool = False) -> FolderSync:
    """Args: ``write`` writes the adapter, and returns its tensors by their names in the file; the others are FolderSync's."""

    def with_manifest(target: Path, version: int) -> Manifest:
        manifest = manifest_of(write(target).items(), version)
        (target / MANIFEST).write_text(manifest.to_json())
        return manifest

    return FolderSync(
        "adapter",
        with_manifest,
        lambda rollout, target, announced: rollout.load_adapter(target, announced),
        folder=folder,
        temporary=temporary,
    )
