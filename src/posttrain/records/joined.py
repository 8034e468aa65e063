"""Trajectories as single rows of sampled tokens, the form in which most advantage estimators read them, and the way back.

A trajectory may have gaps (what an environment said) and may be several rows (where its history was edited). To an estimator it
is one sequence of decisions, whose rewards come at some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.records.batches import SequenceBatch
from posttrain.records.span_tensors import row_counts


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The places of the M sampled tokens of a batch: in its rows and columns, and in one of N trajectories.

    Trajectory n is described by its last row; W is the largest number of tokens that one has.
    """

    rows: Tensor  # [M] int64
    columns: Tensor  # [M] int64
    trajectories: Tensor  # [M] int64, 0 to N - 1
    places: Tensor  # [M] int64, 0 to W - 1
    last_rows: Tensor  # [N] int64
    shape: torch.Size  # [B, T] of the batch
    width: int

    def join(self, values: Tensor) -> Tensor:
        """[B, T] to [N, W], 0 behind a trajectory's end; [B] to [N], of last rows."""
        if values.ndim == 1:
            return values[self.last_rows]
        joined = values.new_zeros(len(self.last_rows), self.width)
        joined[self.trajectories, self.places] = values[self.rows, self.columns]
        return joined

    def join_all(self, values: Tensor | Mapping[str, Tensor] | tuple[Any, ...]) -> Any:
        """A tensor, every tensor in a mapping, or B values of any kind, joined."""
        if isinstance(values, tuple):
            return tuple(values[row] for row in self.last_rows.tolist())
        if isinstance(values, Mapping):
            return {name: self.join(tensor) for name, tensor in values.items()}
        return self.join(values)

    def split(self, values: Tensor) -> Tensor:
        """[N, W] to [B, T], 0 where nothing was sampled."""
        apart = values.new_zeros(self.shape)
        apart[self.rows, self.columns] = values[self.trajectories, self.places]
        return apart


@dataclass(frozen=True, slots=True, eq=False)
class SingleRows:
    """The same for a batch in which every trajectory is one row without gaps, as without environments: its rows are joined
    already, and no place of a token has to be kept."""

    mask: Tensor  # [B, W] bool, the sampled tokens
    columns: int  # T of the batch

    def join(self, values: Tensor) -> Tensor:
        """Do the same as ``Joined.join``."""
        if values.ndim == 1:
            return values.clone()
        return torch.where(self.mask, values[:, : self.mask.shape[1]], values.new_zeros(()))

    def join_all(self, values: Tensor | Mapping[str, Tensor] | tuple[Any, ...]) -> Any:
        """Do the same as ``Joined.join_all``."""
        if isinstance(values, tuple):
            return values
        if isinstance(values, Mapping):
            return {name: self.join(tensor) for name, tensor in values.items()}
        return self.join(values)

    def split(self, values: Tensor) -> Tensor:
        """Do the same as ``Joined.split``."""
        found = torch.where(self.mask, values, values.new_zeros(()))
        return pad(found, (0, self.columns - self.mask.shape[1]))


def has_single_rows(batch: SequenceBatch) -> bool:
    """Return True for a batch in which every trajectory is one row without gaps."""
    single = len(batch) > 0 and bool(batch.last_rows.all())
    return single and torch.equal(batch.response_lengths, row_counts(batch.response_mask))


def joined(batch: SequenceBatch) -> Joined | SingleRows:
    """The places of all sampled tokens (those of ``response_mask``), in the order of rows and columns."""
    mask = batch.response_mask
    if has_single_rows(batch):
        return SingleRows(mask[:, : max(int(batch.response_lengths.max()), 1)], mask.shape[1])
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    last = batch.last_rows
    numbers = last.long().cumsum(0) - last.long()  # [B], which trajectory a row belongs to, counted from 0
    trajectories = numbers[rows]
    sizes = torch.bincount(trajectories, minlength=int(last.sum()))
    starts = sizes.cumsum(0) - sizes
    return Joined(
        rows=rows,
        columns=columns,
        trajectories=trajectories,
        places=torch.arange(len(rows)) - starts[trajectories],
        last_rows=last.nonzero().squeeze(1),
        shape=batch.response_mask.shape,
        width=max(int(sizes.max()), 1),
    )
