"""A step's tensors in the store: each is put once, and a worker gets the records whole."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from batches import sequence_batch
from posttrain.backends.runtime.ray.shelf import (
    AHEAD_BYTES_PER_TOKEN,
    BYTES_PER_TOKEN,
    Shelf,
    Shelved,
    step_bytes,
    taken_down,
)
from posttrain.records.batches import SequenceBatch, TeacherScores, TrainBatch, TrainerLogprobs

ROWS, WIDTH = 64, 1024  # a [ROWS, WIDTH] float32 has 256 KiB


class Store:
    """Promises are places in a list; arrays come back read-only, as from Ray."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in self.values if isinstance(value, np.ndarray))

    def fetched(self, held: Shelved) -> Any:
        arrays = [self.values[promise].copy() for promise in held.arrays]
        for array in arrays:
            array.flags.writeable = False
        return taken_down(self.values[held.record], arrays)


def sequences() -> SequenceBatch:
    mask = torch.arange(WIDTH) < torch.arange(1, ROWS + 1)[:, None]
    return sequence_batch(
        tokens=torch.arange(ROWS * (WIDTH + 2)).view(ROWS, WIDTH + 2),
        prompt_lengths=torch.full((ROWS,), 2),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -torch.rand(ROWS, WIDTH), 0.0),
        group_index=torch.arange(ROWS) // 8,
        sample_ids=tuple(f"a/{row}" for row in range(ROWS)),
    )


def train_batch(batch: SequenceBatch) -> TrainBatch:
    return TrainBatch(
        sequences=batch,
        scores=torch.rand(ROWS),
        logprobs=TrainerLogprobs(old=torch.rand(ROWS, WIDTH)),
        advantages=torch.rand(ROWS, WIDTH),
        loss_mask=batch.response_mask,
        teachers={"one": TeacherScores(rows=torch.ones(ROWS, dtype=torch.bool), top=torch.rand(ROWS, WIDTH, 2, 3))},
    )


def assert_same(found: TrainBatch, batch: TrainBatch) -> None:
    for name in ("tokens", "prompt_lengths", "response_mask", "rollout_logprobs", "group_index", "trajectory_index"):
        assert torch.equal(getattr(found.sequences, name), getattr(batch.sequences, name)), name
    assert found.sequences.sample_ids == batch.sequences.sample_ids
    assert torch.equal(found.advantages, batch.advantages) and torch.equal(found.scores, batch.scores)
    assert found.logprobs.old is not None and batch.logprobs.old is not None
    assert torch.equal(found.logprobs.old, batch.logprobs.old) and found.logprobs.ref is None
    top, expected = found.teachers["one"].top, batch.teachers["one"].top
    assert top is not None and expected is not None and torch.equal(top, expected)
    assert torch.equal(found.loss_mask, batch.loss_mask)


def test_every_tensor_is_put_once() -> None:
    store = Store()
    shelf, batch = Shelf(store.put), sequences()
    first, second = shelf.place(batch), shelf.place(batch)
    assert first.arrays == second.arrays
    # tokens of 8 bytes in 1,026 columns, log-probs of 4 in 1,024; of the mask only lengths go along
    put = ROWS * (8 * 1026 + 4 * 1024)
    assert store.bytes == put
    whole = train_batch(batch)
    held = shelf.place(whole)
    # Besides: old log-probs and advantages of 4 bytes, two of 4 for each of 3 likely tokens; the mask is there already
    assert store.bytes == put + ROWS * 1024 * (4 + 4 + 2 * 3 * 4)
    assert_same(store.fetched(held), whole)


def test_a_mini_batch_of_neighbours_puts_no_array() -> None:
    store = Store()
    shelf, whole = Shelf(store.put), train_batch(sequences())
    shelf.place(whole)
    before = store.bytes
    for start in (0, 16, 48):
        mini = whole.rows(list(range(start, start + 16)))
        assert_same(store.fetched(shelf.place(mini)), mini)
        assert torch.equal(mini.advantages, whole.advantages[start : start + 16])
    assert store.bytes == before


def test_rows_in_another_order_and_changed_tensors_are_put_as_they_are() -> None:
    store = Store()
    shelf, whole = Shelf(store.put), train_batch(sequences())
    shelf.place(whole)
    drawn = whole.rows([5, 3, *range(20, 60)])
    assert_same(store.fetched(shelf.place(drawn)), drawn)
    mini = whole.rows(list(range(8, 40)))
    changed = replace(mini, advantages=mini.advantages * 2)
    assert_same(store.fetched(shelf.place(changed)), changed)


def test_an_edited_tensor_is_put_again() -> None:
    store = Store()
    shelf, tensor = Shelf(store.put), torch.rand(ROWS, WIDTH)
    held = shelf.place([tensor])
    tensor[3] += 1.0
    (found,) = store.fetched(shelf.place([tensor[2:40]]))
    assert torch.equal(found, tensor[2:40]) and held.arrays != shelf.place([tensor]).arrays


def test_any_part_of_a_tensor_comes_as_it_is() -> None:
    store = Store()
    shelf, tensor = Shelf(store.put), torch.rand(ROWS, 2 * WIDTH)
    for part in (tensor[:, :WIDTH], tensor[::2], tensor.t(), tensor.view(-1)[7 : 7 + 40_000], tensor[3:60]):
        (found,) = store.fetched(shelf.place([part]))
        assert torch.equal(found, part)


def test_what_nobody_holds_leaves_the_store() -> None:
    dropped: list[int] = []

    class Promise:
        def __del__(self) -> None:
            dropped.append(1)

    shelf, batch = Shelf(lambda value: Promise()), sequences()
    shelf.place(batch)
    gc.collect()
    assert len(dropped) == 1  # the record itself
    del batch
    gc.collect()
    assert len(dropped) == 3  # and tokens and log-probs


def test_room_for_a_step() -> None:
    assert step_bytes(10, 20) == BYTES_PER_TOKEN * 200
    assert step_bytes(10, 20, 1.5) == (BYTES_PER_TOKEN + 1.5 * AHEAD_BYTES_PER_TOKEN) * 200
    assert 0 <= step_bytes(10**9, 10**6) < 10**15  # never more than there is
