"""Weights on their way: nothing can be dropped, altered or swapped without being noticed within the sync."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.backends.serving.launch import free_port
from posttrain.backends.serving.vllm_worker import WeightReceiver
from posttrain.backends.weight_sync.collective import CollectiveSync
from posttrain.backends.weight_sync.disk import disk_sync
from posttrain.backends.weight_sync.hashed import HashedSync
from posttrain.backends.weight_sync.in_memory import InMemorySync
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, Served
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.loading import load_causal_lm
from posttrain.models.weight_transfer import (
    Manifest,
    TensorEntry,
    WeightsDiffer,
    buckets,
    digest,
    join_group,
    manifest_of,
    read_folder,
    read_manifest,
    receive_buckets,
    send_buckets,
    write_folder,
)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(5, 4, generator=generator),
        "layer.0": torch.randn(7, generator=generator).bfloat16(),  # 14 bytes: no multiple of 8
        "layer.1": torch.randn(3, 3, generator=generator),
        "scale": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
    }


# ------------------------------------------------------------------------------------------------------------- digests


def test_digest_sees_every_bit_and_every_swap() -> None:
    tensor = torch.arange(40, dtype=torch.int16)
    seen = {digest(tensor)}
    for index in range(40):
        for bit in range(16):
            changed = tensor.clone()
            changed[index] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
            seen.add(digest(changed))
    for first in range(40):
        for second in range(first):
            swapped = tensor.clone()
            swapped[[first, second]] = swapped[[second, first]]
            seen.add(digest(swapped))
    assert len(seen) == 1 + 40 * 16 + 40 * 39 // 2


def test_digest_is_of_the_bytes_whatever_the_layout() -> None:
    tensor = torch.randn(6, 5)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    parent = torch.cat([torch.zeros(1), tensor.flatten()])  # 4 bytes off: not aligned to 8
    assert digest(parent[1:].view(6, 5)) == digest(tensor)
    assert digest(torch.zeros(3)) != digest(torch.zeros(5))  # padding to 8 bytes hides no length
    assert digest(torch.zeros(0)) == "0" * 16


def test_content_hash_is_of_names_dtypes_shapes_and_bytes_in_any_order() -> None:
    base = manifest_of(weights().items(), 1).content_hash
    assert manifest_of(reversed(weights().items()), 2).content_hash == base
    changes: list[Callable[[dict[str, Tensor]], Any]] = [
        lambda w: w.pop("scale"),
        lambda w: w.update(more=torch.zeros(1)),
        lambda w: w.update(embed=w["embed"].reshape(4, 5)),
        lambda w: w.update(embed=w["embed"].view(torch.int32)),
        lambda w: w.update({"layer.1": w["layer.1"] + 1e-6}),
    ]
    hashes = {base}
    for change in changes:
        changed = weights()
        change(changed)
        hashes.add(manifest_of(changed.items(), 1).content_hash)
    assert len(hashes) == 1 + len(changes)
    with pytest.raises(WeightsDiffer, match="scale comes twice"):
        manifest_of([*weights().items(), ("scale", torch.zeros(1))], 1)


def test_manifest_survives_json() -> None:
    manifest = manifest_of(weights().items(), 7)
    assert Manifest.from_json(manifest.to_json()) == manifest
    for broken in ("", "[]", '{"version": 1}', '{"version": 1, "tensors": [["a"]]}'):
        with pytest.raises(WeightsDiffer, match="cannot be read"):
            Manifest.from_json(broken)


# ------------------------------------------------------------------------------------------------------------- a folder


def test_folder_gives_back_what_was_written_in_shards_of_bounded_size(tmp_path: Path) -> None:
    """embed has 80 bytes, layer.0 14, layer.1 36, scale 4, empty 0: at most 96 a shard gives 80 + 14, 36 + 4 + 0."""
    manifest = write_folder(tmp_path, weights().items(), 3, shard_bytes=96)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001.safetensors",
        "model-00002.safetensors",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 80 + 14 + 36 + 4
    assert index["weight_map"]["scale"] == "model-00002.safetensors"
    assert read_manifest(tmp_path, manifest.content_hash) == manifest
    for name, tensor in read_folder(tmp_path, manifest):
        assert torch.equal(tensor, weights()[name]) and tensor.dtype == weights()[name].dtype


def damage_tensor(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model-00001.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dropped": (lambda f: damage_tensor(f, lambda t: t.pop("layer.0")), "layer.0 did not arrive"),
    "altered": (lambda f: damage_tensor(f, lambda t: t["layer.1"].add_(1e-6)), "layer.1 was altered on the way"),
    "swapped": (
        lambda f: damage_tensor(f, lambda t: t.update(embed=t["embed"].flip(0))),
        "embed was altered on the way",
    ),
    "another shape": (
        lambda f: damage_tensor(f, lambda t: t.update(embed=t["embed"].reshape(4, 5).contiguous())),
        "embed was sent with shape .5, 4. and arrived with .4, 5.",
    ),
    "another dtype": (
        lambda f: damage_tensor(f, lambda t: t.update(embed=t["embed"].double())),
        "embed was sent with dtype float32 and arrived with float64",
    ),
    "one too many": (lambda f: damage_tensor(f, lambda t: t.update(x=torch.zeros(1))), "x arrived and was not sent"),
    "missing file": (lambda f: (f / "model-00001.safetensors").unlink(), "did not arrive .5 of 5 tensors"),
    "cut file": (lambda f: _cut(f / "model-00001.safetensors"), "cannot be read"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "cannot be read"),
    "another version's manifest": (
        lambda f: (f / "manifest.json").write_text(manifest_of([("a", torch.zeros(1))], 1).to_json()),
        "were announced",
    ),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_on_disk_is_found_by_the_receiver_before_it_takes_anything(
    tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    manifest = write_folder(tmp_path, weights().items(), 3, shard_bytes=1 << 20)
    damage(tmp_path)
    worker, taken = receiver()
    report = worker.posttrain_load(str(tmp_path), manifest.content_hash)
    assert list(report) == ["error"] and re.search(words, report["error"])
    assert taken == {} and worker.posttrain_served() == {"version": 0, "content_hash": ""}


def receiver() -> tuple[WeightReceiver, dict[str, Tensor]]:
    """vLLM's worker with our extension, and the tensors that it has taken."""
    taken: dict[str, Tensor] = {}

    class Runner:
        model = torch.nn.Linear(1, 1)

        def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
            taken.update((name, tensor.clone()) for name, tensor in weights_iterator)

    worker = WeightReceiver()
    worker.model_runner, worker.device, worker.rank = Runner(), torch.device("cpu"), 0
    return worker, taken


def test_receiver_takes_a_folder_and_says_so(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path, weights().items(), 3, shard_bytes=64)
    worker, taken = receiver()
    served = {"version": 3, "content_hash": manifest.content_hash}
    assert worker.posttrain_load(str(tmp_path), manifest.content_hash) == worker.posttrain_served() == served
    assert all(torch.equal(taken[name], tensor) for name, tensor in weights().items())


# ----------------------------------------------------------------------------------------------------------- a broadcast


def test_buckets_are_bounded_and_a_large_tensor_has_its_own() -> None:
    entries = [TensorEntry(str(n), "uint8", (size,), "") for n, size in enumerate([3, 4, 9, 20, 1, 9, 1])]
    cut = [[entry.nbytes for entry in bucket] for bucket in buckets(entries, 10)]
    assert cut == [[3, 4], [9], [20], [1, 9], [1]]


def broadcast(sent: dict[str, Tensor], announced: Manifest, bucket_bytes: int) -> tuple[dict[str, Tensor], Any]:
    """Send to a receiver in another thread, by gloo. Returns what it took and what it reported."""
    port, (worker, taken) = free_port(), receiver()
    words = (announced.to_json(), "gloo", "127.0.0.1", str(port), "1", "2", str(bucket_bytes), "30")
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(worker.posttrain_receive, *words)
        group = join_group("gloo", "127.0.0.1", port, 0, 2, 30)
        send_buckets(group, sent.items(), announced, bucket_bytes)
        return taken, report.result()


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_broadcast_arrives(bucket_bytes: int) -> None:
    manifest = manifest_of(weights().items(), 4)
    taken, report = broadcast(weights(), manifest, bucket_bytes)
    assert report == {"version": 4, "content_hash": manifest.content_hash}
    assert all(torch.equal(taken[name], tensor) for name, tensor in weights().items())


def test_altered_tensor_in_a_broadcast_is_found() -> None:
    manifest = manifest_of(weights().items(), 4)
    altered = weights()
    altered["layer.1"][0, 0] += 1e-6
    _, report = broadcast(altered, manifest, 40)
    assert "layer.1 was altered on the way" in report["error"]


def test_missing_tensor_in_a_broadcast_is_found_by_the_sender() -> None:
    manifest = manifest_of(weights().items(), 4)

    class Group:
        def broadcast(self, tensor: Tensor, root: int) -> Any:
            return type("Work", (), {"wait": lambda self: None})()

    fewer = {name: tensor for name, tensor in weights().items() if name != "layer.1"}
    with pytest.raises(WeightsDiffer, match=r"layer\.1 was to be sent, and scale came"):
        send_buckets(Group(), fewer.items(), manifest, 1 << 20)
    with pytest.raises(WeightsDiffer, match="empty was to be sent, and nothing came"):
        send_buckets(Group(), list(weights().items())[:-1], manifest, 1 << 20)


def test_dropped_bytes_in_a_broadcast_are_found() -> None:
    manifest = manifest_of(weights().items(), 4)

    class Silence:  # every bucket arrives as zeros
        def broadcast(self, tensor: Tensor, root: int) -> Any:
            tensor.zero_()
            return type("Work", (), {"wait": lambda self: None})()

    with pytest.raises(WeightsDiffer, match="embed was altered"):
        list(receive_buckets(Silence(), manifest, 64, "cpu"))


# --------------------------------------------------------------------------------------------------------------- syncs


class Policy:
    version = 0


class Sampler:
    """A WeightTaker around the real worker extension."""

    def __init__(self) -> None:
        self.version = -1
        self.worker, self.taken = receiver()
        self.before: Callable[[Path], Any] = lambda folder: None

    def weights_changed(self, version: int) -> None:
        self.version = version

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        self.before(folder)
        return self._report(self.worker.posttrain_load(str(folder), announced.content_hash))

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        words = (manifest, group.backend, group.address, str(group.port), "1", str(group.size))
        return self._report(self.worker.posttrain_receive(*words, str(group.bucket_bytes), str(group.timeout_s)))

    def _report(self, report: dict[str, Any]) -> list[tuple[str, Served]]:
        if "error" in report:
            raise RunStopped(report["error"])
        return [("worker", Served(**report))]


def test_disk_sync_sends_checks_and_cleans_up(tmp_path: Path) -> None:
    sampler, held = Sampler(), weights()
    sync = disk_sync(held.items, folder=tmp_path, shard_bytes=64, beside=lambda f: (f / "config.json").write_text("{}"))
    sampler.before = lambda folder: seen.append((folder / "config.json").exists())
    seen: list[bool] = []
    hashes = set()
    for version in (0, 1, 2):
        Policy.version = version
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
        assert sampler.version == version
        assert all(torch.equal(sampler.taken[name], tensor) for name, tensor in held.items())
        assert sync.sent is not None and list(tmp_path.iterdir()) == []
        hashes.add(sync.sent.content_hash)
        held["embed"] += 1e-6
    assert len(hashes) == 3 and seen == [True] * 3


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_disk_sync_stops_the_step_when_the_folder_was_damaged(
    tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    sampler = Sampler()
    sampler.before = damage
    sync = disk_sync(weights().items, folder=tmp_path, shard_bytes=1 << 20)
    with pytest.raises(RunStopped, match=words):
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
    assert sampler.version == -1 and sync.sent is None


def test_hash_is_told_now_and_then_and_equal_ones_are_noticed() -> None:
    """Every second sync of new weights, from the first on; a sync without an update counts for nothing."""
    held, told = weights(), []
    sampler = Sampler()
    sync = HashedSync(InMemorySync(), held.items, every_steps=2, report=told.append)
    hashes = []
    for version, change in ((0, 0.0), (1, 0.5), (1, 0.5), (2, 1e-6), (3, 1.0), (4, -1.0)):
        held["embed"] += change
        hashes.append(manifest_of(held.items(), version).content_hash)
        Policy.version = version
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
        assert sampler.version == version
    has = "the sampler's weights of version {} have the hash {}"
    assert told[:2] == [has.format(0, hashes[0]), has.format(2, hashes[3])]
    assert hashes[0] != hashes[3]
    held["embed"] -= held["embed"] - weights()["embed"]
    for version in (5, 6, 7, 8):
        Policy.version = version
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
    repeated = "as those of version 6: the updates in between changed nothing"
    assert len(told) == 5 and told[-1].endswith(repeated) and repeated not in told[-2]


def test_collective_sync_sends_and_checks() -> None:
    sampler, held = Sampler(), weights()
    sync = CollectiveSync(held.items, bucket_bytes=40, timeout_s=30)
    for version in (0, 1):
        Policy.version = version
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
        assert sampler.version == version
        assert all(torch.equal(sampler.taken[name], tensor) for name, tensor in held.items())
        held["embed"] += 1e-6


def test_collective_sync_stops_the_step_when_weights_change_on_the_way() -> None:
    turns = iter([weights(), {**weights(), "embed": weights()["embed"] + 1e-6}])  # hashed, and then sent
    sync = CollectiveSync(lambda: next(turns).items(), bucket_bytes=40, timeout_s=30)
    sampler = Sampler()
    with pytest.raises(RunStopped, match="embed was altered on the way"):
        sync.publish(Policy(), sampler)  # type: ignore[arg-type]
    assert sampler.version == -1 and sync.sent is None


def test_collective_sync_tells_why_a_sampler_did_not_come() -> None:
    class Absent(Sampler):
        def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
            raise RunStopped("the server is gone")

    sync = CollectiveSync(weights().items, bucket_bytes=40, timeout_s=1)
    with pytest.raises(RunStopped, match="the server is gone"):
        sync.publish(Policy(), Absent())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ a model's weights


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
def test_weights_are_named_as_in_the_models_own_file(folder: str, request: pytest.FixtureRequest) -> None:
    """The tiny Llama shares its embeddings, which its file holds once."""
    path: Path = request.getfixturevalue(folder)
    model = load_causal_lm(str(path), dtype=torch.float32)
    sent = dict(hugging_face_weights(model))
    file = load_file(path / "model.safetensors")
    assert sent.keys() == file.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in file.items())


def test_adapter_is_merged_into_the_weights(tiny_qwen: Path) -> None:
    from posttrain.config.lora import LoraConfig
    from posttrain.models.lora import add_adapter

    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    plain = {name: tensor.clone() for name, tensor in hugging_face_weights(model)}
    add_adapter(model, LoraConfig(rank=2, alpha=4, target_modules=["q_proj"]), seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    merged = dict(hugging_face_weights(model))
    assert merged.keys() == plain.keys()
    # W + alpha / rank x B A = W + 2 x 0.5 x (the sum of A's two rows, in every row)
    expected = plain["model.layers.0.self_attn.q_proj.weight"] + layer.lora_A["default"].weight.sum(dim=0)
    torch.testing.assert_close(merged["model.layers.0.self_attn.q_proj.weight"], expected)
    changed = [name for name in plain if not torch.equal(plain[name], merged[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]
