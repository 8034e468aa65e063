"""Weights that samplers hold and the trainers no longer have: written to a folder, and taken by samplers of a later start."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from posttrain.backends.runtime.ray.sending import in_buckets
from posttrain.backends.runtime.ray.taking import named, tensors_of
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.weight_sync import check_served
from posttrain.models.weight_transfer import MANIFEST, Manifest, TensorEntry

BUCKET_BYTES = 64 << 20
WHAT = "weights for a batch that is still to be sampled"  # for messages


def keep(samplers: WorkerGroup, folder: Path, version: int) -> bool:
    """Write the weights of the first sampler, a bucket per file, and last their manifest.

    Returns: False when it cannot give them back. Raises: WorkerLost when it is lost meanwhile; RunStopped for a full disk.
    """
    first, entries = samplers.members[0], list[TensorEntry]()
    with named():
        folder.mkdir(parents=True)
    while True:
        promise = samplers.cluster.call(first.handle, "call", "taker.next_held", True, BUCKET_BYTES)
        bucket = samplers.watch.wait({first: promise}, WHAT, samplers.timeout_s)[first]
        if bucket is None:
            break
        with named():
            tensors = {entry.name: tensor for entry, tensor in tensors_of(bucket)}
            save_file(tensors, folder / f"model-{len(entries):05d}.safetensors", {"format": "pt"})
        entries += bucket[0]
    with named():
        (folder / MANIFEST).write_text(Manifest(version, tuple(entries)).to_json())
    return bool(entries)


def hand_over(samplers: WorkerGroup, folder: Path) -> int:
    """Send all samplers the weights of a folder. Returns: their version.

    Raises: WorkerLost; RunStopped when the files are not those that were written, or a sampler has got other weights.
    """
    with named():
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
    files = sorted(folder.glob("*.safetensors"))
    weights = ((name, tensor) for file in files for name, tensor in load_file(file).items())
    for entries, flat in in_buckets(weights, BUCKET_BYTES):
        bucket = samplers.cluster.put((entries, flat.numpy()))
        taking = {
            member: samplers.cluster.call(member.handle, "call", "taker.take_bucket", True, bucket)
            for member in samplers.members
        }
        samplers.watch.wait(taking, WHAT, samplers.timeout_s)
    announced = Served(manifest.version, manifest.content_hash)
    serving = {
        member: samplers.cluster.call(member.handle, "call", "taker.finish", True, manifest.version)
        for member in samplers.members
    }
    found = samplers.watch.wait(serving, WHAT, samplers.timeout_s)
    check_served(announced, [(member.name, served) for member, served in found.items()])
    return manifest.version
