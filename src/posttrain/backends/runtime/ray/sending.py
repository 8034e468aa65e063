"""Sending of the policy's weights by a rank of the trainers: as flat buckets, by a broadcast, or through a folder.

Every rank makes the same calls in the same order, because gathering what is shared out takes all of them; rank 0 alone keeps
and sends what was gathered. Digests of every tensor are taken here, and again where it arrives (``taking``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.torch_training.sharding import Sharding
from posttrain.interfaces.rollout_engine import Served
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.lora import CONFIG as ADAPTER_CONFIG
from posttrain.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from posttrain.models.lora import adapter_settings, file_name
from posttrain.models.weight_transfer import (
    MANIFEST,
    Manifest,
    TensorEntry,
    entry_of,
    join_group,
    manifest_of,
    send_buckets,
    write_folder,
)


class Sender:
    """Sending of weights by one rank.

    Args: dtype to compute in, in which weights travel; ``to_copies``: the samplers hold the same module as the trainers, so that
        what is trained is enough, under the module's own names; ``adapter``: the samplers have the base weights, so that the LoRA
        adapter is enough, under the names of peft's files; otherwise everything travels, as a Hugging Face checkpoint names it;
        ``describe`` writes what a server reads beside the weights into a folder; ``wake`` is called before the weights
        are read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sharding: Sharding,
        dtype: torch.dtype,
        *,
        to_copies: bool,
        adapter: bool = False,
        device: torch.device,
        rank: int,
        timeout_s: float,
        describe: Callable[[Path], None],
        wake: Callable[[], None] = lambda: None,
    ):
        self.model, self.sharding, self.dtype = model, sharding, dtype
        self.to_copies, self.adapter = to_copies, adapter
        self._device, self._rank, self._timeout_s = device, rank, timeout_s
        self._describe = describe
        self._wake = wake

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, on the CPU. All ranks must go through it together; what others than rank 0 get of a
        checkpoint is nothing."""
        self._wake()
        if not (self.to_copies or self.adapter):
            yield from hugging_face_weights(
                self.model,
                self.sharding.whole,
                keep=self._rank == 0,
                dtype=self.dtype,
                gathered=self.sharding.everything(self.model),
            )
            return
        for name, tensor in self.sharding.weights(self.model):
            yield file_name(name) if self.adapter else name, tensor.to(self.dtype)

    def settings(self) -> str:
        """Return the settings that a sampler reads with an adapter sent alone; "" for whole weights."""
        return adapter_settings(self.model) if self.adapter else ""

    def begin(self, bucket_bytes: int) -> int:
        """Prepare the buckets. Returns: the number of calls of ``next_bucket``."""
        self._sent: list[TensorEntry] = []
        if self.to_copies or self.adapter:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            sizes = [self.sharding.shape(each).numel() * self.dtype.itemsize for each in trained]
            self._buckets = in_buckets(self.weights(), bucket_bytes)
        else:  # the parts of a checkpoint are known only once it is there
            held = list(self.weights())
            sizes = [tensor.nbytes for _, tensor in held]
            self._buckets = in_buckets(iter(held), bucket_bytes)
        return sum(1 for _ in cut(sizes, bucket_bytes))

    def next_bucket(self) -> tuple[tuple[TensorEntry, ...], Any] | None:
        """The next tensors, and their bytes one after another as an array; None where nothing is kept."""
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        entries, flat = bucket
        self._sent += entries
        return entries, flat.numpy()

    def finish(self, version: int) -> Served:
        """Return the version and hash of the weights sent."""
        manifest = Manifest(version, tuple(self._sent))
        return Served(version, manifest.content_hash, manifest.nbytes)

    def manifest(self, version: int) -> str:
        """Return the manifest of the next ``broadcast``, as JSON."""
        return manifest_of(self.weights(), version).to_json()

    def announced(self, manifest: str) -> Served:
        """Return the version and hash that a manifest announces."""
        return announced(manifest)

    def broadcast(self, manifest: str, meeting: tuple[str, int], size: int, bucket_bytes: int) -> None:
        """Send the weights of a manifest to every sampler, which takes them with ``receive``."""
        if self._rank > 0:
            for _ in self.weights():  # rank 0 sends what all gather
                pass
            return
        group = join_group(backend_of(self._device), *meeting, 0, size, self._timeout_s)
        weights = ((name, tensor.to(self._device)) for name, tensor in self.weights())
        send_buckets(group, weights, Manifest.from_json(manifest), bucket_bytes)

    def write(self, folder: Path, version: int, shard_bytes: int) -> Served | None:
        """Write to a folder shared with the samplers. Returns: the weights in it; None when another rank has written them."""
        if self._rank > 0:
            for _ in self.weights():
                pass
            return None
        if self.adapter:
            manifest = self._write_adapter(folder, version)
        else:
            manifest = write_folder(folder, self.weights(), version, shard_bytes=shard_bytes)
            self._describe(folder)
        return Served(version, manifest.content_hash, manifest.nbytes)

    def _write_adapter(self, folder: Path, version: int) -> Manifest:
        tensors = dict(self.weights())
        folder.mkdir(parents=True)
        save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(self.settings(), encoding="utf-8")
        manifest = manifest_of(tensors.items(), version)
        (folder / MANIFEST).write_text(manifest.to_json())
        return manifest


def announced(manifest: str) -> Served:
    """Return the version and hash that a manifest announces."""
    listed = Manifest.from_json(manifest)
    return Served(listed.version, listed.content_hash, listed.nbytes)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def in_buckets(
    weights: Iterator[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[tuple[TensorEntry, ...], Tensor]]:
    """Concatenate tensors in flat buckets."""
    entries: list[TensorEntry] = []
    parts: list[Tensor] = []
    for name, tensor in weights:
        entry = entry_of(name, tensor)
        if entries and sum(each.nbytes for each in entries) + entry.nbytes > bucket_bytes:
            yield tuple(entries), torch.cat(parts)
            entries, parts = [], []
        entries.append(entry)
        parts.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
    if entries:
        yield tuple(entries), torch.cat(parts)


def cut(sizes: Sequence[int], bucket_bytes: int) -> Iterator[int]:
    """Compute the size of each bucket in bytes: at most the limit, except that a larger tensor has a bucket of its own."""
    held = 0
    for size in sizes:
        if held and held + size > bucket_bytes:
            yield held
            held = 0
        held += size
    if held:
        yield held
