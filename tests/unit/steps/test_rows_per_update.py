"""Trajectories are counted, not the rows that they were cut into."""

from __future__ import annotations

import torch

from batches import sequence_batch, train_batch
from posttrain.records.batches import TrainBatch
from posttrain.steps.update import rows_per_update


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


def test_a_trajectory_is_in_one_update_with_all_its_rows() -> None:
    # trajectories of 2, 1, 3 and 1 rows, two to an update
    assert rows_per_update(batch([0, 0, 1, 2, 2, 2, 3], 7), 2) == [[0, 1, 2], [3, 4, 5, 6]]
    assert rows_per_update(batch([4, 4, 9], 3), 1) == [[0, 1], [2]]  # numbers of a part of a step


def test_single_rows_are_cut_by_count() -> None:
    assert rows_per_update(batch(None, 5), 2) == [[0, 1], [2, 3], [4]]
