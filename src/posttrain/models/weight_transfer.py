"""Transfer of weights from the trainer to a sampler: manifest, digests, files and broadcast buckets.

Imported by the trainer and inside the sampler's own process, which may be another Python without posttrain's dependencies:
so this file imports only torch, safetensors and the standard library.

A *manifest* lists every tensor with its dtype, shape and digest; its hash is the content hash of a version of the weights. Both
ends compute the digests from their own bytes, so a tensor that was dropped, altered or swapped is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MANIFEST = "manifest.json"
_CHUNK = 1 << 20  # lanes hashed at a time, so that temporaries stay in the processor's cache
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as int64.
_STEP, _MIX = -7046029254386353131, -4658895280553007687


class WeightsDiffer(Exception):
    """The received weights differ from those sent. The message names the tensor."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    digest: str  # of the bytes, 16 hex digits

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of a version of the weights, in the order of transfer."""

    version: int  # number of updates made to these weights
    tensors: tuple[TensorEntry, ...]

    @property
    def content_hash(self) -> str:
        """Hash of names, dtypes, shapes and digests, but not of the version; 32 hex digits."""
        lines = sorted(f"{each.name} {each.dtype} {list(each.shape)} {each.digest}" for each in self.tensors)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """Total size of all tensors."""
        return sum(each.nbytes for each in self.tensors)

    def to_json(self) -> str:
        tensors = [[each.name, each.dtype, list(each.shape), each.digest] for each in self.tensors]
        return json.dumps({"version": self.version, "tensors": tensors})

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parse a manifest. Raises: WeightsDiffer when the text is none."""
        try:
            value = json.loads(text)
            tensors = tuple(
                TensorEntry(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in value["tensors"]
            )
            return Manifest(int(value["version"]), tensors)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsDiffer(f"the list of tensors cannot be read: {error}") from error


def manifest_of(weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
    """Build a manifest. Raises: WeightsDiffer when a name occurs twice."""
    entries = tuple(entry_of(name, tensor) for name, tensor in weights)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise WeightsDiffer(f"{next(name for name in names if names.count(name) > 1)} comes twice")
    return Manifest(version, entries)


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest(tensor))


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Hash a tensor's bytes to 16 hex digits, the same on every device; dtype and shape do not enter.

    Every 8 bytes are mixed with their position and summed modulo 2^64: fast on a GPU, where a cryptographic hash would first
    have to copy everything to the host. It detects accidents, not forgeries.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()  # a view as int64 needs aligned bytes
    lanes = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    for start in range(0, lanes.numel(), _CHUNK):
        part = lanes[start : start + _CHUNK]
        position = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=lanes.device)
        mixed = position.mul_(_STEP).bitwise_xor_(part)
        mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_MIX)
        total += mixed.bitwise_xor_(mixed >> 32).mul_(_STEP).sum()
    return f"{int(total) & (2**64 - 1):016x}"


def check_tensor(expected: TensorEntry, tensor: Tensor) -> None:
    """Raises: WeightsDiffer unless the tensor equals the one that was sent."""
    found = entry_of(expected.name, tensor)
    if found != expected:
        for what in ("dtype", "shape"):
            if getattr(found, what) != getattr(expected, what):
                sent, arrived = getattr(expected, what), getattr(found, what)
                raise WeightsDiffer(f"{expected.name} was sent with {what} {sent} and arrived with {arrived}")
        raise WeightsDiffer(f"{expected.name} was altered on the way: digest {found.digest}, sent {expected.digest}")


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises: WeightsDiffer when a tensor is missing or superfluous."""
    wanted, had = set(expected), set(found)
    if missing := sorted(wanted - had):
        raise WeightsDiffer(f"{missing[0]} did not arrive ({len(missing)} of {len(wanted)} tensors are missing)")
    if extra := sorted(had - wanted):
        raise WeightsDiffer(f"{extra[0]} arrived and was not sent")


# ------------------------------------------------------------------------------------------------------ in a folder


def write_folder(folder: Path, weights: Iterable[tuple[str, Tensor]], version: int, *, shard_bytes: int) -> Manifest:
    """Write weights as safetensors shards of about ``shard_bytes`` each, their index, and last the manifest.

    At most one shard is copied at a time. Returns: the manifest, with digests of the tensors in memory.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    entries: list[TensorEntry] = []
    places: dict[str, str] = {}

    def shards() -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        for name, tensor in weights:
            if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
                yield shard
                shard = {}
            if name in places or name in shard:
                raise WeightsDiffer(f"{name} comes twice")
            shard[name] = tensor
        if shard:
            yield shard

    for number, shard in enumerate(shards(), start=1):
        file = f"model-{number:05d}.safetensors"
        entries += [entry_of(name, tensor) for name, tensor in shard.items()]
        save_file({name: _own(tensor) for name, tensor in shard.items()}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    manifest = Manifest(version, tuple(entries))
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def read_manifest(folder: Path, content_hash: str) -> Manifest:
    """Read the manifest of a folder. Raises: WeightsDiffer when it is missing, or is not the announced one."""
    try:
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
    except OSError as error:
        raise WeightsDiffer(f"{folder / MANIFEST} cannot be read: {error}") from error
    if manifest.content_hash != content_hash:
        raise WeightsDiffer(f"{folder} holds weights {manifest.content_hash}, and {content_hash} were announced")
    return manifest


def read_folder(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, each after its check against the manifest; check completeness at the end.

    Raises: WeightsDiffer.
    """
    from safetensors import SafetensorError, safe_open

    expected = {entry.name: entry for entry in manifest.tensors}
    seen: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                    tensor = file.get_tensor(name)
                    check_names(expected, {*expected, name})
                    check_tensor(expected[name], tensor)
                    seen.append(name)
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise WeightsDiffer(f"{path} cannot be read: {error}") from error
    check_names(expected, seen)


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Raises: WeightsDiffer when a folder does not match its manifest."""
    for _ in read_folder(folder, manifest):
        pass


# ----------------------------------------------------------------------------------------------------- by broadcast


def buckets(entries: Sequence[TensorEntry], bucket_bytes: int) -> list[list[TensorEntry]]:
    """Group consecutive tensors whose bytes together fit into a bucket; a larger tensor gets a bucket of its own."""
    cut: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        if not cut or entry.nbytes > room:
            cut.append([])
            room = bucket_bytes
        cut[-1].append(entry)
        room -= entry.nbytes
    return cut


def send_buckets(group: Any, weights: Iterable[tuple[str, Tensor]], manifest: Manifest, bucket_bytes: int) -> None:
    """Broadcast from rank 0 of a process group: one flat uint8 tensor per bucket, on the device of the weights.

    Raises: WeightsDiffer when the names differ from those of the manifest.
    """
    rest = iter(weights)
    for bucket in buckets(manifest.tensors, bucket_bytes):
        parts = []
        for entry in bucket:
            name, tensor = next(rest, ("nothing", None))
            if tensor is None or name != entry.name:
                raise WeightsDiffer(f"{entry.name} was to be sent, and {name} came")
            parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        group.broadcast(torch.cat(parts), 0).wait()


def receive_buckets(
    group: Any, manifest: Manifest, bucket_bytes: int, device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors sent by ``send_buckets``, each after its check.

    Every bucket is received even when one is wrong, so that the sender does not block. Raises: WeightsDiffer at the end.
    """
    wrong: WeightsDiffer | None = None
    for bucket in buckets(manifest.tensors, bucket_bytes):
        flat = torch.empty(sum(entry.nbytes for entry in bucket), dtype=torch.uint8, device=device)
        group.broadcast(flat, 0).wait()
        start = 0
        for entry in bucket:
            part = flat[start : start + entry.nbytes]
            start += entry.nbytes
            dtype = dtype_of(entry.dtype)
            aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
            tensor = aligned.view(dtype).view(entry.shape)
            try:
                check_tensor(entry, tensor)
            except WeightsDiffer as error:
                wrong = wrong or error
            if wrong is None:
                yield entry.name, tensor
    if wrong is not None:
        raise wrong


def join_group(backend: str, address: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """Create a process group besides the default one that a sampler may have. ``backend`` is gloo or nccl."""
    from datetime import timedelta

    dist: Any = import_module("torch.distributed")  # its C++ classes lack annotations
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def dtype_of(name: str) -> torch.dtype:
    """Parse the name of a dtype. Raises: WeightsDiffer for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsDiffer(f"{name} is no dtype")
    return dtype


def _own(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory of its own: safetensors rejects views that share memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()
