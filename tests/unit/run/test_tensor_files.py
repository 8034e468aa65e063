"""A file of tensors is the same, whoever writes its rows, and any reader of safetensors reads it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.records.computed_tensors import by_rows, lies_elsewhere
from posttrain.records.span_tensors import first_columns
from posttrain.records.stored_rows import HeldArray
from posttrain.records.stored_tensors import StoredTensor, stored_rows
from posttrain.run import tensor_files
from posttrain.run.tensor_files import write_tensors

B, T = 37, 50


def on_ranks(ranks: int) -> Callable[..., Tensor]:
    """Let ranks compute shares of the rows, each from what a message to it would hold."""

    def over_rows(of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        parts = []
        for start, end in pairwise(B * rank // ranks for rank in range(ranks + 1)):
            sent, share = pickle.loads(pickle.dumps((of, [each[start:end] for each in tensors])))  # noqa: S301
            assert all(isinstance(each, StoredTensor) for each in share if lies_elsewhere(each))
            parts.append(sent(*share))
        return torch.cat(parts)

    return over_rows


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of a step: plain, stored and described tensors of B rows, and of another number of rows."""
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, T + 1, (B,), generator=made)
    mask = first_columns(lengths, T)
    logprobs = torch.where(mask, torch.randn(B, T, generator=made), 0.0)
    ids = torch.where(mask, torch.randint(1, 1 << 40, (B, T), generator=made), 0)
    stored = stored_rows(logprobs, lengths, HeldArray)
    return {
        "mask": mask,
        "logprobs": stored,
        "again": stored,
        "ids": stored_rows(ids, lengths, HeldArray),
        "rewards": torch.randn(B, generator=made),
        "half": torch.randn(B, 3, generator=made).bfloat16(),
        "odd": torch.randn(B, T, generator=made)[:, ::2],
        "none": torch.zeros(0, T),
        "one": torch.tensor(7),
        "others": first_columns(torch.tensor([1, 2, 0]), 2),
    }


def plain(tensor: Tensor) -> Tensor:
    return tensor.clone().contiguous()


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_same_bytes_whoever_writes_them(
    tmp_path: Path, tensors: dict[str, Tensor], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: plain(each) for name, each in tensors.items()}
    alone, shared = tmp_path / "alone.safetensors", tmp_path / "batches" / "shared.safetensors"
    write_tensors(alone, expected, {"b": "2", "a": "é"}, lambda of, *rows: of(*rows))
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 1000)  # several pieces of each share
    over_rows = on_ranks(ranks)

    def of_whole_steps(of: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        return over_rows(of, *rows) if len(rows[0]) == B else of(*rows)

    write_tensors(shared, tensors, {"a": "é", "b": "2"}, of_whole_steps)
    assert shared.read_bytes() == alone.read_bytes()
    assert [each.name for each in shared.parent.iterdir()] == [shared.name]
    found = load_file(shared)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each), name
    with safe_open(shared, framework="pt") as file:
        assert file.metadata() == {"a": "é", "b": "2"}


def test_computed_rows_are_written_where_their_inputs_are(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    twice = by_rows(partial(torch.mul, 2.0), tensors["logprobs"], dtype=torch.float32)
    asked = []

    def over_rows(of: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return of(*rows)

    write_tensors(tmp_path / "step.safetensors", {"twice": twice, "rewards": tensors["rewards"]}, {}, over_rows)
    assert asked == [2]  # the numbers of the rows, and the one tensor that is not here
    assert torch.equal(load_file(tmp_path / "step.safetensors")["twice"], 2 * plain(tensors["logprobs"]))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "step_1.safetensors"
    (tmp_path / "step_1.tmp").mkdir()
    with pytest.raises(RunStopped, match=r"step_1\.safetensors: .*Is a directory"):
        write_tensors(path, tensors, {}, lambda of, *rows: of(*rows))
    (tmp_path / "step_1.tmp").rmdir()

    def elsewhere(of: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        (tmp_path / "step_1.tmp").unlink(missing_ok=True)  # a node that does not see the folder
        return of(*rows)

    with pytest.raises(RunStopped, match=r"step_1\.safetensors: .*No such file"):
        write_tensors(path, tensors, {}, elsewhere)
    assert not path.exists()
