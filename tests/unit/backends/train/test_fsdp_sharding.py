"""How micro-batches are dealt out over processes; what needs processes is in tests/parity/test_update_paths.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from counted_reads import counted_reads
from posttrain.backends.torch_training.saved import saved_weights
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.models.chunks import ChunkedTensors
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import Family, write_tiny_model
from posttrain.plan.engines.fsdp import FsdpSettings


def dealt(parts: list[list[int]], loads: list[int], ranks: int) -> list[list[list[int]]]:
    """What every process gets, without starting them."""
    everyone = []
    for rank in range(ranks):
        sharding = object.__new__(FsdpSharding)
        sharding.rank, sharding.ranks = rank, ranks
        everyone.append(sharding.deal(parts, loads))
    return everyone


def test_heavy_micro_batches_are_shared_out() -> None:
    # 9 + 1 and 5 + 5 tokens
    assert dealt([[0], [1, 2], [3], [4]], [9, 5, 1, 5], 2) == [[[0], [3]], [[1, 2], [4]]]


@pytest.mark.parametrize(("count", "ranks"), [(1, 2), (5, 2), (7, 3), (2, 4), (6, 1)])
def test_everyone_makes_as_many_passes_and_every_row_is_dealt_once(count: int, ranks: int) -> None:
    parts = [[2 * number, 2 * number + 1] for number in range(count)]
    everyone = dealt(parts, [number + 1 for number in range(count)], ranks)
    assert {len(mine) for mine in everyone} == {-(-count // ranks)}
    assert sorted(row for mine in everyone for part in mine for row in part) == list(range(2 * count))


def test_a_dry_run_as_one_of_512(tiny_qwen: Path) -> None:
    """With process groups that send nothing: the meshes, the groups and the parts are those of 512 processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=259, world_size=512)
    try:
        settings = FsdpSettings(shard=64, replicas=8)
        sharding = FsdpSharding("cpu", param_dtype=torch.float32, settings=settings, sequence=4)
        model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
        weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        sharding.wrap(model)
        assert sharding.mesh.shape == (8, 64)
        # Rank 259 = 4 x 64 + 3: the fourth of the fifth replica; its sequence is shared by 256 to 259.
        assert tuple(sharding.mesh.get_coordinate()) == (4, 3)
        assert dist.get_process_group_ranks(sharding.group) == [256, 257, 258, 259]
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor) and tuple(weight.shape) == weights[name]
            part = -(-weights[name][0] // 64)  # the first dimension in 64 parts, the last ones empty
            assert len(weight.to_local()) == min(part, max(0, weights[name][0] - 3 * part))
        parts, loads = [[number] for number in range(256)], [1] * 256
        assert len(sharding.deal(parts, loads)) == 2  # 256 micro-batches over 512 / 4 copies
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1, 4])  # 17 rows over 5 processes: 4, 4, 4, 4, 1
def test_a_process_reads_its_own_part_of_saved_tensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    wanted = {"matrix": torch.arange(51.0).view(17, 3), "row": torch.arange(2.0)}
    save_file(wanted, tmp_path / "whole.safetensors")
    saved = ChunkedTensors(tmp_path, whole=[tmp_path / "whole.safetensors"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=5)
    try:
        sharding = FsdpSharding("cpu", param_dtype=torch.float32)
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros_like(wanted[name])) for name in wanted})
        fully_shard(model, mesh=sharding.mesh)
        expected = {name: sharding.part(wanted[name], like=weight) for name, weight in model.items()}
        monkeypatch.setattr(ChunkedTensors, "__getitem__", lambda *_: pytest.fail("a whole tensor was read"))
        for name, weight in model.items():
            found = sharding.read(saved, name, like=weight)
            assert isinstance(found, DTensor) and found.shape == weight.shape and found.stride() == weight.stride()
            assert torch.equal(found.to_local(), expected[name].to_local())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe", "mixtral"])
# torch takes the meshes of two ranks of one size for the same
@pytest.mark.parametrize(("rank", "ranks"), [(0, 3), (2, 6)])
def test_a_process_resumes_from_its_part_of_the_files(tmp_path: Path, family: Family, rank: int, ranks: int) -> None:
    """Of a gathered checkpoint, also where the experts of a layer are one tensor in memory and many in the files."""
    path = write_tiny_model(tmp_path / "model", family)
    whole = dict(load_causal_lm(str(path), dtype=torch.float32).named_parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        sharding = FsdpSharding("cpu", param_dtype=torch.float32)
        model = load_causal_lm(str(path), dtype=torch.float32)
        model_class = type(model)
        sharding.wrap(model)
        with counted_reads() as reads:
            saved = saved_weights(
                path, model, model_class, adapted=False, path_field="model.path", shape=sharding.shape
            )
            found = {name: sharding.read(saved, name, like=weight) for name, weight in model.named_parameters()}
        assert all(torch.equal(found[name].to_local(), weight.to_local()) for name, weight in model.named_parameters())
        assert reads.bytes == 4 * sum(weight.to_local().numel() for weight in model.parameters())
        # 2 of 4 experts at most
        assert reads.bytes < 0.6 * 4 * sum(weight.numel() for weight in whole.values())
    finally:
        dist.destroy_process_group()
