"""Trajectories are counted, not the rows that they were cut into."""

from __future__ import annotations

import torch

from batches import sequence_batch, train_batch
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import CriticUpdatePlan, ValueLossPlan
from posttrain.steps.mini_batches import is_drawn, rows_per_update


def batch(trajectories: list[int] | None, rows: int) -> TrainBatch:
    mask = torch.ones(rows, 1, dtype=torch.bool)
    sequences = sequence_batch(
        tokens=torch.zeros(rows, 2, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=torch.zeros(rows, 1),
        group_index=torch.zeros(rows, dtype=torch.int64),
        sample_ids=("a",) * rows,
        trajectory_index=torch.arange(rows) if trajectories is None else torch.tensor(trajectories),
    )
    return train_batch(sequences, advantages=torch.zeros(rows, 1), loss_mask=mask)


def plan(sequences: int, seed: int | None = None) -> CriticUpdatePlan:
    loss = ValueLossPlan(value_clip=None, aggregation="token_mean")
    return CriticUpdatePlan(loss=loss, epochs=1, sequences_per_update=sequences, shuffle_seed=seed)


def test_a_trajectory_is_in_one_update_with_all_its_rows() -> None:
    # trajectories of 2, 1, 3 and 1 rows, two to an update
    assert rows_per_update(batch([0, 0, 1, 2, 2, 2, 3], 7), plan(2)) == [[0, 1, 2], [3, 4, 5, 6]]
    assert rows_per_update(batch([4, 4, 9], 3), plan(1)) == [[0, 1], [2]]  # numbers of a part of a step


def test_single_rows_are_cut_by_count() -> None:
    assert rows_per_update(batch(None, 5), plan(2)) == [[0, 1], [2, 3], [4]]


def test_drawn_mini_batches_hold_every_row_once_and_differ_by_pass_and_seed() -> None:
    step = batch(None, 12)
    drawn = [rows_per_update(step, plan(4, seed), epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for mini_batches in drawn:
        assert [len(rows) for rows in mini_batches] == [4, 4, 4]
        assert sorted(row for rows in mini_batches for row in rows) == list(range(12))
        assert all(rows == sorted(rows) for rows in mini_batches)
    assert len({str(mini_batches) for mini_batches in drawn}) == 3
    assert rows_per_update(step, plan(4, 1), 1) == drawn[1]  # no state: a resumed run draws the same
    assert rows_per_update(step, plan(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_drawn_trajectories_keep_their_rows_together() -> None:
    step = batch([0, 0, 1, 2, 2, 2, 3], 7)
    kept = [{0, 1}, {2}, {3, 4, 5}, {6}]
    for seed in range(8):
        first, second = rows_per_update(step, plan(2, seed))
        assert all(rows <= set(first) or rows <= set(second) for rows in kept)
        assert sum(rows <= set(first) for rows in kept) == 2


def test_a_single_mini_batch_is_not_drawn() -> None:
    assert not is_drawn(batch(None, 4), plan(4, 1)) and is_drawn(batch(None, 5), plan(4, 1))
    assert rows_per_update(batch(None, 4), plan(4, 1)) == [[0, 1, 2, 3]]
