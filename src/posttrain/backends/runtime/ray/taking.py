"""Receiving of the policy's weights in a sampler's worker: into a copy of the module, or for a server beside it.

Each way of sending (``sending``) has its method here. Every tensor's digest is computed again and compared; what differs ends
the run and is named.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.backends.runtime.ray.sending import announced, backend_of, in_buckets
from posttrain.backends.runtime.ray.worker import Failure
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, RolloutEngine, Served, WeightTaker
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.lora import CONFIG as ADAPTER_CONFIG
from posttrain.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from posttrain.models.weight_transfer import (
    MANIFEST,
    Manifest,
    TensorEntry,
    WeightsDiffer,
    check_names,
    check_tensor,
    dtype_of,
    join_group,
    receive_buckets,
)

Bucket = tuple[tuple[TensorEntry, ...], Any] | Failure


class Taker(Protocol):
    """Receiver of weights in a sampler's worker. Each method raises RunStopped when other weights arrive than were sent."""

    def take_bucket(self, bucket: Bucket) -> Failure | None:
        """Receive tensors in shared memory. Returns: the sender's failure, where it has sent one instead."""
        ...

    def receive(self, manifest: str, meeting: tuple[str, int], rank: int, size: int, bucket_bytes: int) -> None:
        """Receive the tensors of a manifest by a broadcast."""
        ...

    def finish(self, version: int, adapter: str = "") -> Served:
        """Serve what was received. ``adapter`` holds the settings of a LoRA adapter that was sent without its base model."""
        ...

    def load(self, folder: Path, sent: Served) -> Served:
        """Read the weights in a folder and serve them."""
        ...

    def next_held(self, bucket_bytes: int) -> Bucket | None:
        """Return the next part of the weights that are served, None after the last one; at once where they cannot be given
        back."""
        ...


class CopyTaker:
    """See Taker. For a sampler that reads a module of this process."""

    def __init__(
        self, rollout: RolloutEngine, arriving: Mapping[str, Tensor], *, device: torch.device, timeout_s: float
    ):
        self._rollout, self._arriving = rollout, arriving
        self._device, self._timeout_s = device, timeout_s
        self._taken: dict[str, TensorEntry] = {}
        self._held: Iterator[tuple[tuple[TensorEntry, ...], Tensor]] | None = None

    def take_bucket(self, bucket: Bucket) -> Failure | None:
        if isinstance(bucket, Failure):
            return bucket
        with named():
            for entry, tensor in tensors_of(bucket):
                check_tensor(entry, tensor)
                self._take(entry, tensor)
        return None

    def receive(self, manifest: str, meeting: tuple[str, int], rank: int, size: int, bucket_bytes: int) -> None:
        listed = Manifest.from_json(manifest)
        group = join_group(backend_of(self._device), *meeting, rank, size, self._timeout_s)
        entries = {entry.name: entry for entry in listed.tensors}
        with named():
            for name, tensor in receive_buckets(group, listed, bucket_bytes, self._device):
                self._take(entries[name], tensor)

    def finish(self, version: int, adapter: str = "") -> Served:
        served = Served(version, Manifest(version, tuple(self._taken.values())).content_hash)
        with named():
            check_names(self._arriving, self._taken)
        self._taken = {}
        self._rollout.weights_changed(version)
        return served

    def load(self, folder: Path, sent: Served) -> Served:
        raise RunStopped("a sampler that reads a module of its own process takes no folder")

    def next_held(self, bucket_bytes: int) -> Bucket | None:
        if self._held is None:
            self._held = in_buckets(iter(self._arriving.items()), bucket_bytes)
        bucket = next(self._held, None)
        if bucket is None:
            self._held = None
            return None
        return bucket[0], bucket[1].numpy()

    def _take(self, entry: TensorEntry, tensor: Tensor) -> None:
        if entry.name not in self._arriving:
            raise WeightsDiffer(f"{entry.name} arrived, and the sampler has no such tensor")
        self._arriving[entry.name].data.copy_(tensor)
        self._taken[entry.name] = entry


class ServerTaker:
    """See Taker. For a server of this worker's, whose own processes compute the digests of what they load: buckets become the
    files of a folder on this machine, and a broadcast goes to the server's processes directly."""

    def __init__(self, server: WeightTaker, *, device: torch.device, timeout_s: float):
        self._server = server
        self._device, self._timeout_s = device, timeout_s
        self._folder: Path | None = None  # with the buckets that came so far
        self._taken: list[TensorEntry] = []
        self._received: Served | None = None

    def take_bucket(self, bucket: Bucket) -> Failure | None:
        if isinstance(bucket, Failure):
            return bucket
        folder = self._folder = self._folder or Path(tempfile.mkdtemp(prefix="posttrain-weights-"))
        tensors = {entry.name: tensor for entry, tensor in tensors_of(bucket)}
        with named():
            save_file(tensors, folder / f"model-{len(self._taken):05d}.safetensors", {"format": "pt"})
        self._taken += bucket[0]
        return None

    def receive(self, manifest: str, meeting: tuple[str, int], rank: int, size: int, bucket_bytes: int) -> None:
        sent = announced(manifest)
        plan = BroadcastPlan(
            backend=backend_of(self._device),
            address=meeting[0],
            port=meeting[1],
            size=size,
            first_rank=rank,
            bucket_bytes=bucket_bytes,
            timeout_s=self._timeout_s,
        )
        check_served(sent, self._server.receive(manifest, sent, plan))
        self._received = sent

    def finish(self, version: int, adapter: str = "") -> Served:
        if self._received is not None:
            served, self._received = self._received, None
            self._server.weights_changed(served.version)
            return served
        assert self._folder is not None
        manifest, folder = Manifest(version, tuple(self._taken)), self._folder
        self._folder, self._taken = None, []
        try:
            with named():
                (folder / MANIFEST).write_text(manifest.to_json())
                if adapter:
                    as_adapter(folder, adapter)
            return self._load(folder, Served(version, manifest.content_hash), adapter)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, folder: Path, sent: Served) -> Served:
        return self._load(folder, sent)

    def next_held(self, bucket_bytes: int) -> Bucket | None:
        return None

    def _load(self, folder: Path, sent: Served, adapter: str = "") -> Served:
        load = self._server.load_adapter if adapter else self._server.load_folder
        check_served(sent, load(folder, sent))
        self._server.weights_changed(sent.version)
        return sent


def as_adapter(folder: Path, settings: str) -> None:
    """Turn the buckets in a folder into peft's one file of an adapter, with its settings beside it."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in files:
        file.unlink()
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(settings, encoding="utf-8")


def tensors_of(bucket: tuple[tuple[TensorEntry, ...], Any]) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield the tensors stored one after another in an array."""
    entries, data = bucket
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # shared memory cannot be written to, and is not
        flat = torch.from_numpy(data)
    start = 0
    for entry in entries:
        part = flat[start : start + entry.nbytes]
        start += entry.nbytes
        dtype = dtype_of(entry.dtype)
        aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
        yield entry, aligned.view(dtype).view(entry.shape)


@contextmanager
def named() -> Iterator[None]:
    """Raises: RunStopped for weights that differ, and for a disk that does not take them."""
    try:
        yield
    except (WeightsDiffer, OSError) as error:
        raise RunStopped(f"weights on their way to the sampler: {error}") from error
