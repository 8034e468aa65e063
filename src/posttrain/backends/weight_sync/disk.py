"""Weight sync through a folder shared by trainer and sampler: safetensors shards and their manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from posttrain.backends.serving.folder_sync import FolderSync
from posttrain.models.weight_transfer import Manifest, write_folder
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("disk")
def disk_sync(
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    folder: Path,
    shard_bytes: int,
    beside: Callable[[Path], None] = lambda folder: None,
    temporary: bool = False,
) -> FolderSync:
    """Args: ``weights`` returns the policy's, with Hugging Face names; ``beside`` writes config and tokenizer files for servers
    that read them; the others are FolderSync's."""

    def write(target: Path, version: int) -> Manifest:
        manifest = write_folder(target, weights(), version, shard_bytes=shard_bytes)
        beside(target)
        return manifest

    return FolderSync(
        "weights",
        write,
        lambda rollout, target, announced: rollout.load_folder(target, announced),
        folder=folder,
        temporary=temporary,
    )
