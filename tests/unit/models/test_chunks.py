"""Chunks of tensors in the files of several processes: by hand, and as torch's own reader sees them."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from counted_reads import counted_reads
from posttrain.errors import ModelError
from posttrain.models.chunks import Chunk, ChunkedTensors, StoredBox, shapes_of, stretch_of, whole_chunk, write_chunks


@pytest.fixture
def wanted() -> dict[str, Tensor]:
    return {
        "columns": torch.arange(6.0).view(2, 3),
        "rows": torch.arange(5.0)[:, None],
        "step": torch.tensor(7.0),
        "twice": torch.arange(8.0).view(4, 2),
        "whole": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    }


@pytest.fixture
def written(tmp_path: Path, wanted: dict[str, Tensor]) -> Path:
    """By three processes; the third holds nothing."""
    rows, columns, twice = wanted["rows"], wanted["columns"], wanted["twice"]
    first = [
        Chunk("rows", (0, 0), rows[:3]),
        Chunk("columns", (0, 0), columns[:, :2]),
        Chunk("twice", (0, 0), twice[:1]),
        Chunk("twice", (2, 0), twice[2:3]),
        whole_chunk("step", wanted["step"]),
        whole_chunk("whole", wanted["whole"]),
    ]
    second = [
        Chunk("rows", (3, 0), rows[3:]),
        Chunk("columns", (0, 2), columns[:, 2:]),
        Chunk("twice", (1, 0), twice[1:2]),
        Chunk("twice", (3, 0), twice[3:]),
    ]
    for rank, chunks in enumerate((first, second, [])):
        write_chunks(tmp_path / "weights", rank, chunks)
    return tmp_path / "weights"


@pytest.mark.parametrize("in_one_file", [False, True])
def test_any_part_of_a_tensor_is_read(
    written: Path, wanted: dict[str, Tensor], tmp_path: Path, in_one_file: bool
) -> None:
    save_file(wanted, tmp_path / "whole.safetensors")
    saved = ChunkedTensors(written, whole=[tmp_path / "whole.safetensors"] if in_one_file else [])
    assert saved.shapes == shapes_of(wanted)
    for name in ("columns", "rows", "twice"):
        rows, columns = wanted[name].shape
        for top, left, bottom, right in product(range(rows), range(columns), range(rows + 1), range(columns + 1)):
            if top <= bottom and left <= right:
                found = saved.part(name, (top, left), (bottom - top, right - left))
                assert torch.equal(found, wanted[name][top:bottom, left:right])
    assert torch.equal(saved.part("whole", (1,), (1,)), torch.tensor([2.5], dtype=torch.bfloat16))
    assert torch.equal(saved["step"], wanted["step"])


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Tensor, ChunkedTensors]:
    """Of 2 experts a gate [3, 5] and an up projection [3, 5] each, one tensor [2, 6, 5] in the model and four in the file."""
    both = torch.arange(60.0).view(2, 6, 5)
    stored, boxes = {}, {}
    for expert in range(2):
        for begin, kind in ((0, "gate"), (3, "up")):
            stored[f"{expert}.{kind}"] = both[expert, begin : begin + 3].contiguous()
            boxes[f"{expert}.{kind}"] = StoredBox("experts", (expert, begin, 0), (1, 3, 5))
    save_file(stored, tmp_path / "experts.safetensors")
    with counted_reads() as reads:
        saved = ChunkedTensors(tmp_path, whole=[tmp_path / "experts.safetensors"], boxes=boxes)
    assert not reads.bytes
    return both, saved


def test_tensors_of_a_file_are_boxes_of_the_models(experts: tuple[Tensor, ChunkedTensors]) -> None:
    both, saved = experts
    assert saved.shapes == {"experts": (2, 6, 5)} and torch.equal(saved["experts"], both)
    for first, begin, end in ((0, 1, 5), (1, 3, 6), (0, 0, 3)):
        found = saved.part("experts", (first, begin, 1), (1, end - begin, 2))
        assert torch.equal(found, both[first : first + 1, begin:end, 1:3])


def test_a_stored_tensor_of_another_shape_is_no_part(tmp_path: Path) -> None:
    save_file({"0.gate": torch.zeros(3, 4)}, tmp_path / "experts.safetensors")
    boxes = {"0.gate": StoredBox("experts", (0, 0, 0), (1, 3, 5))}
    assert ChunkedTensors(tmp_path, whole=[tmp_path / "experts.safetensors"], boxes=boxes).shapes == {"0.gate": (3, 4)}


def test_no_more_is_read_than_is_asked_for(written: Path, wanted: dict[str, Tensor]) -> None:
    with counted_reads() as reads:
        saved = ChunkedTensors(written)
    saved.part("columns", (0, 1), (2, 2))
    assert reads.bytes == 4 * 2 * 2
    # Values 3 to 6 of rows of two: rows 1 to 3.
    assert torch.equal(stretch_of(saved, "twice", 3, 4), torch.tensor([3.0, 4, 5, 6]))
    assert reads.bytes == 4 * (2 * 2 + 3 * 2)


@pytest.mark.parametrize("in_memory", [False, True])
def test_any_stretch_of_a_tensor_is_read(written: Path, wanted: dict[str, Tensor], in_memory: bool) -> None:
    saved = wanted if in_memory else ChunkedTensors(written)
    for name, tensor in wanted.items():
        for first, end in product(range(tensor.numel() + 1), repeat=2):
            found = stretch_of(saved, name, first, max(0, end - first))
            assert torch.equal(found, tensor.reshape(-1)[first:end])


def test_whole_tensors_come_back(written: Path, wanted: dict[str, Tensor]) -> None:
    found = ChunkedTensors(written)
    assert list(found) == sorted(wanted) and len(found) == 5
    assert shapes_of(found) == shapes_of(wanted) == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )
    assert found.get("other") is None and "other" not in found
    # Two boxes of one tensor are two files.
    assert len(list(written.iterdir())) == 4


def test_torch_reads_the_same(written: Path, wanted: dict[str, Tensor]) -> None:
    empty = {name: torch.zeros_like(tensor) for name, tensor in wanted.items() if tensor.dim()}
    state_dict_loader.load(empty, storage_reader=HuggingFaceStorageReader(str(written)), no_dist=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in empty.items())


@pytest.mark.parametrize("lost", ["shard-00001-model-00002-of-00002", "shard-00002-model-00001-of-00002"])
def test_a_file_that_is_missing(written: Path, lost: str) -> None:
    (written / f"{lost}.safetensors").unlink()
    with pytest.raises(ModelError, match=r"does not hold all of (columns|twice)") as told:
        ChunkedTensors(written)
    assert "files of all processes" in str(told.value)


@pytest.mark.parametrize("damage", ["cut off", "of others"])
def test_a_file_that_cannot_be_read(written: Path, damage: str) -> None:
    path = sorted(written.iterdir())[0]
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:100])
    else:
        save_file({"whole": torch.zeros(2)}, path)  # without the places
    with pytest.raises(ModelError, match=f"{re.escape(path.name)} cannot be read"):
        ChunkedTensors(written)
