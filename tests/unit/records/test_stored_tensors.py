"""Tensors of stored arrays are the tensors of their values, and are read only where values are needed."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrain.records.stored_rows import HeldArray, StoredRow, digest_of, equal_keys
from posttrain.records.stored_tensors import (
    StoredTensor,
    concatenated,
    in_arrays,
    padded,
    stored_rows,
)


class Counted(HeldArray):
    """An array that counts how often it is fetched."""

    def __init__(self, values: NDArray[Any]):
        super().__init__(values)
        self.reads = 0

    def read(self) -> NDArray[Any]:
        self.reads += 1
        return super().read()


def example(count: int = 5, width: int = 4, cut_at: int = 1 << 20) -> tuple[torch.Tensor, StoredTensor, list[Counted]]:
    """Row i has 1, 2, ..., width + 1 values or none, and 0 behind them; and the same in arrays of at most ``cut_at`` bytes."""
    lengths = torch.arange(count) % (width + 1)
    values = torch.where(
        torch.arange(width) < lengths[:, None], torch.arange(1.0, 1 + count * width).view(count, width), 0
    )
    arrays: list[Counted] = []

    def keep(array: NDArray[Any]) -> Counted:
        arrays.append(Counted(array.copy()))
        return arrays[-1]

    return values, stored_rows(values, lengths, keep), arrays


def test_whoever_looks_gets_the_values() -> None:
    values, stored, _ = example()
    assert torch.equal(stored, values) and torch.equal(stored.read(), values)
    assert stored.tolist() == values.tolist() and np.array_equal(stored.numpy(), values.numpy())
    assert torch.equal(values - stored, torch.zeros_like(values))
    assert torch.equal(torch.where(stored > 3, stored, -1.0), torch.where(values > 3, values, -1.0))
    assert torch.equal(stored[:, 1:3], values[:, 1:3]) and torch.equal(stored[1:4, :2], values[1:4, :2])
    assert stored[2, 1].item() == values[2, 1].item()
    rows, columns = torch.tensor([4, 1, 2]), torch.tensor([0, 3, 1])
    assert torch.equal(stored[rows, columns], values[rows, columns]) and torch.equal(stored[rows, 1], values[rows, 1])
    weights = torch.ones_like(values, requires_grad=True)
    (weights * stored).sum().backward()
    assert weights.grad is not None and torch.equal(weights.grad, values)
    assert type(stored + 0) is torch.Tensor


def test_shapes_rows_and_messages_read_nothing() -> None:
    _, stored, arrays = example()
    assert stored.shape == (5, 4) and len(stored) == 5 and stored.dtype == torch.float32 and stored.ndim == 2
    taken = stored[torch.tensor([4, 1])][:1]
    sent = pickle.loads(pickle.dumps(stored[1:]))  # noqa: S301
    assert isinstance(taken, StoredTensor) and isinstance(sent, StoredTensor)
    assert all(array.reads == 0 for array in arrays)
    assert torch.equal(sent, stored[1:].read())


@pytest.mark.parametrize(
    "index", [slice(1, 3), slice(0, 0), torch.tensor([3, 0, 3]), torch.tensor([True, False, True, False, True])]
)
def test_rows_are_those_of_the_values(index: Any) -> None:
    values, stored, _ = example()
    found = stored[index]
    assert isinstance(found, StoredTensor) and torch.equal(found, values[index])


def test_rows_need_their_own_arrays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.records.stored_tensors.ARRAY_BYTES", 16)  # four values
    values, stored, arrays = example(count=12)
    assert len(arrays) > 4
    assert torch.equal(stored[:2], values[:2])
    assert [array.reads for array in arrays] == [1, *[0] * (len(arrays) - 1)]
    assert torch.equal(concatenated([stored[7:], stored[:7]]), torch.cat([values[7:], values[:7]]))


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 64))
def test_stretches_are_cut_between_and_never_within(lengths: list[int], size: int) -> None:
    flat = np.arange(sum(lengths), dtype=np.int32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("posttrain.records.stored_tensors.ARRAY_BYTES", size)
        arrays, numbers, starts = in_arrays(flat, np.array(lengths, np.int64))
    found = [arrays[n][s : s + length].tolist() for n, s, length in zip(numbers, starts, lengths, strict=True)]
    assert [value for row in found for value in row] == flat.tolist()
    assert all(array.nbytes <= size + 4 * 9 for array in arrays)


def test_prompts_and_stored_responses_beside_each_other() -> None:
    """Prompts are right-aligned before column 3; the second response is a tuple."""
    prompts = [(1, 2), (3, 4, 5)]
    stored = StoredRow(HeldArray(np.array([7, 8, 9])), 1, 2, digest_of((8, 9)))
    columns = torch.tensor([1, 0]), torch.tensor([3, 3])
    found = padded((prompts, columns[0]), ([stored, (6,)], columns[1]), width=5, dtype=torch.int64)
    expected = torch.tensor([[0, 1, 2, 8, 9], [3, 4, 5, 6, 0]])
    assert isinstance(found, StoredTensor) and torch.equal(found, expected)
    plain = padded((prompts, columns[0]), ([(8, 9), (6,)], columns[1]), width=5, dtype=torch.int64)
    assert type(plain) is torch.Tensor and torch.equal(plain, expected)


def test_the_response_columns_are_taken_unread_and_a_cut_stretch_is_read() -> None:
    stored = StoredRow(HeldArray(np.array([7, 8, 9])), 1, 2, digest_of((8, 9)))
    rows = ([(1, 2), (3, 4, 5)], torch.tensor([1, 0])), ([stored, (6,)], torch.tensor([3, 3]))
    found = padded(*rows, width=5, dtype=torch.int64)[:, 3:]
    assert isinstance(found, StoredTensor) and found.tolist() == [[8, 9], [6, 0]]
    assert all(sum(part.lengths) in (0, 3) for part in found.parts)  # nothing of the prompts
    cut = padded(*rows, width=5, dtype=torch.int64)[:, 2:]
    assert type(cut) is torch.Tensor and cut.tolist() == [[2, 8, 9], [5, 6, 0]]
    assert found[:, 5:].shape == (2, 0)


@pytest.mark.parametrize("index", [slice(0, 3), slice(0, 0), torch.tensor([11, 0, 5])])
def test_gathered_rows_hold_their_own_values_and_no_others(monkeypatch: pytest.MonkeyPatch, index: Any) -> None:
    monkeypatch.setattr("posttrain.records.stored_tensors.ARRAY_BYTES", 16)  # four values
    values, stored, _ = example(count=12)
    found = stored[index].gathered()
    assert torch.equal(found, values[index])
    [array] = found.parts[0].arrays
    assert array.read().tolist() == [each for row in values[index].tolist() for each in row if each]


def test_a_stored_row_reads_like_a_tuple() -> None:
    row = StoredRow(HeldArray(np.array([7, 8, 9, 4])), 1, 2, digest_of((8, 9)))
    assert row == (8, 9) and list(row) == [8, 9] and len(row) == 2 and row[0] == 8
    assert row[1:] == (9,) and (*row, 1) == (8, 9, 1) and hash(row) == hash((8, 9)) and repr(row) == "(8, 9)"
    assert row + (1,) == (8, 9, 1) and (1,) + row == (1, 8, 9)
    assert np.asarray(row, np.int64).tolist() == [8, 9] and row != (8,) and row != 3
    assert digest_of(row) == digest_of((8, 9)) != digest_of((9, 8))


def test_equal_token_ids_have_equal_keys_wherever_they_lie() -> None:
    """Tuples alone, stored rows alone, and both at once: (8, 9) three times, (9, 8) once."""
    stored = [StoredRow(HeldArray(np.array([7, *each])), 1, 2, digest_of(each)) for each in [(8, 9), (9, 8)]]
    for rows in (
        [(8, 9), (8, 9), (8, 9), (9, 8)],
        [stored[0], stored[0], stored[0], stored[1]],
        [*stored, (8, 9), (8, 9)],
    ):
        assert sorted(Counter(equal_keys(rows)).values()) == [1, 3]
