"""Tensors [B, T] that are one value per row within spans of its columns, and 0 outside: masks, and advantages of whole responses.

The mask of a response of one turn is one span, that of an episode a span for each of its turns; an advantage that is the same for
all tokens of a response is a number and the spans of its mask. So a step of 100,000 responses has a few MB of each, wherever it
travels, and a rank makes full the rows that it computes.

    row of a mask     . . # # # . # # . .      spans of the row: columns 2 to 5 and 6 to 8 (the end is not included)
    value of the row  0.5                      as advantages: 0.5 where # is, 0 elsewhere

The functions here take plain tensors, too, and give the same numbers for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.records.computed_tensors import by_rows
from posttrain.records.unread_tensors import UnreadTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Stretches of columns in B rows. Row i has those with the numbers ``first[i]`` up to, not with, ``first[i + 1]``, from left
    to right; none is empty, and two never touch."""

    first: NDArray[np.int64]  # [B + 1]
    begins: NDArray[np.int32]  # [S] columns
    ends: NDArray[np.int32]  # [S] columns, not included

    @property
    def counts(self) -> NDArray[np.int64]:
        """[B]: spans of each row."""
        return np.diff(self.first)

    def columns_of_rows(self) -> NDArray[np.int64]:
        """[B]: columns of each row that are in a span."""
        before = np.concatenate([[0], (self.ends - self.begins).cumsum(dtype=np.int64)])
        return before[self.first[1:]] - before[self.first[:-1]]

    def rows(self, index: NDArray[np.int64] | slice) -> Spans:
        """The spans of these rows. A slice has no step."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self.first) - 1)
            first = self.first[start : max(stop, start) + 1]
            own = slice(first[0], first[-1])
            return Spans(first=first - first[0], begins=self.begins[own], ends=self.ends[own])
        counts = self.counts[index]
        first = np.concatenate([[0], counts.cumsum()])
        places = np.arange(first[-1]) + np.repeat(self.first[index] - first[:-1], counts)
        return Spans(first=first, begins=self.begins[places], ends=self.ends[places])

    def of_kept(self, kept: NDArray[np.bool_]) -> Spans:
        """The same rows, where those that are not kept have no span. Args: kept [B]."""
        counts = self.counts
        own = np.repeat(kept, counts)
        first = np.concatenate([[0], np.where(kept, counts, 0).cumsum()])
        return Spans(first=first, begins=self.begins[own], ends=self.ends[own])

    def from_column(self, column: int) -> Spans:
        """The columns from this one on, which is then the first."""
        own = self.ends > column
        before = np.concatenate([[0], own.cumsum()])
        return Spans(
            first=before[self.first],
            begins=np.maximum(self.begins[own] - np.int32(column), 0),
            ends=self.ends[own] - np.int32(column),
        )


class SpanTensor(UnreadTensor):
    """See the module. Args: of_rows [B], a number per row; in masks True, wherever a row has a span. width T; dtype."""

    spans: Spans
    of_rows: NDArray[Any]

    @staticmethod
    def __new__(cls, spans: Spans, of_rows: NDArray[Any], width: int, dtype: torch.dtype) -> SpanTensor:
        made = cls._described(len(of_rows), width, dtype)
        made.spans, made.of_rows = spans, of_rows
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SpanTensor, (self.spans, self.of_rows, self.shape[1], self.dtype)

    def _made_full(self) -> Tensor:
        full = torch.zeros(self.shape, dtype=self.dtype)
        rows = np.repeat(np.arange(len(self)), self.spans.counts).tolist()
        array, values = full.numpy(), np.repeat(self.of_rows, self.spans.counts).tolist()
        for row, begin, end, value in zip(
            rows, self.spans.begins.tolist(), self.spans.ends.tolist(), values, strict=True
        ):
            array[row, begin:end] = value
        return full

    def rows(self, index: slice | Tensor) -> SpanTensor:
        chosen = index if isinstance(index, slice) else np.arange(len(self))[index.numpy()]
        return SpanTensor(self.spans.rows(chosen), self.of_rows[chosen], self.shape[1], self.dtype)

    def from_column(self, column: int) -> SpanTensor:
        return SpanTensor(self.spans.from_column(column), self.of_rows, self.shape[1] - column, self.dtype)


def first_columns(lengths: Tensor, width: int) -> SpanTensor:
    """A mask that is True in the first columns of each row. Args: lengths [B], from 0 up to T; width T. Returns: [B, T] bool."""
    of = lengths.numpy()
    used = of > 0
    spans = Spans(
        first=np.concatenate([[0], used.cumsum()]),
        begins=np.zeros(int(used.sum()), np.int32),
        ends=of[used].astype(np.int32),
    )
    return SpanTensor(spans, np.ones(len(of), np.bool_), width, torch.bool)


def last_columns(lengths: Tensor, width: int) -> SpanTensor:
    """A mask that is True in the last of the first columns of each row. Args: lengths [B], from 0 (no column) up to T; width T.
    Returns: [B, T] bool."""
    found = first_columns(lengths, width)
    spans = replace(found.spans, begins=found.spans.ends - np.int32(1))
    return SpanTensor(spans, found.of_rows, width, torch.bool)


def mask_of_flags(flags: Sequence[Sequence[bool]], width: int) -> SpanTensor:
    """A mask of B rows of at most T flags each, False behind them. Args: width T. Returns: [B, T] bool."""
    lengths = np.fromiter(map(len, flags), np.int64, len(flags))
    # One row after the other with a False behind each, so that no span goes on in the next row
    each = chain.from_iterable(chain(row, one) for row, one in zip(flags, repeat((False,)), strict=False))
    change = np.diff(np.fromiter(each, np.int8, int(lengths.sum()) + len(flags)), prepend=0)
    begins, ends = (change > 0).nonzero()[0], (change < 0).nonzero()[0]
    starts = np.concatenate([[0], (lengths + 1).cumsum()])[:-1]
    rows = np.searchsorted(starts, begins, "right") - 1
    spans = Spans(
        first=np.concatenate([[0], np.bincount(rows, minlength=len(flags)).cumsum()]),
        begins=(begins - starts[rows]).astype(np.int32),
        ends=(ends - starts[rows]).astype(np.int32),
    )
    return SpanTensor(spans, np.ones(len(flags), np.bool_), width, torch.bool)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put one number per row on the columns that the mask selects. Args: values [B]; mask [B, T] bool. Returns: [B, T], 0
    elsewhere."""
    if isinstance(mask, SpanTensor):
        return SpanTensor(mask.spans, values.detach().numpy(), mask.shape[1], values.dtype)
    return torch.where(mask, values[:, None], values.new_zeros(()))


def kept_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """The mask, False in the other rows. Args: mask [B, T] bool; rows [B] bool."""
    if isinstance(mask, SpanTensor):
        return SpanTensor(mask.spans.of_kept(rows.numpy()), mask.of_rows, mask.shape[1], mask.dtype)
    return mask & rows[:, None]


def row_counts(mask: Tensor) -> Tensor:
    """Count the columns that are True in each row. Args: mask [B, T] bool. Returns: [B] int64."""
    if isinstance(mask, SpanTensor):
        return torch.from_numpy(mask.spans.columns_of_rows())
    return mask.sum(dim=1)


def zero_rows(tensor: Tensor) -> Tensor:
    """The rows that hold nothing but 0, as far as that is known without reading stored values: False where it is not.

    Args: tensor [B, T]. Returns: [B] bool."""
    if isinstance(tensor, SpanTensor):
        return torch.from_numpy((tensor.of_rows == 0) | (tensor.spans.counts == 0))
    if isinstance(tensor, UnreadTensor):
        return torch.zeros(len(tensor), dtype=torch.bool)
    return ~(tensor != 0).any(dim=1)


def first_places(mask: Tensor) -> Tensor:
    """The first column that is True in each row, 0 where none is. Args: mask [B, T] bool. Returns: [B] int64."""
    if isinstance(mask, SpanTensor):
        spans = mask.spans
        used, first = spans.counts > 0, spans.first[:-1]
        places = np.zeros(len(mask), np.int64)
        places[used] = spans.begins[first[used]]
        return torch.from_numpy(places)
    return mask.to(torch.uint8).argmax(dim=1)


def last_places(mask: Tensor) -> Tensor:
    """The columns up to the last that is True in each row: 0 where none is. Args: mask [B, T] bool. Returns: [B] int64."""
    if isinstance(mask, SpanTensor):
        spans = mask.spans
        used, last = spans.counts > 0, spans.first[1:] - 1
        places = np.zeros(len(mask), np.int64)
        places[used] = spans.ends[last[used]]
        return torch.from_numpy(places)
    if not mask.numel():
        return torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    if mask.device.type == "cpu":
        # numpy's argmax of bools ends at the first True: a fifth of the time of a pass over numbers
        flags = mask.numpy()
        places = flags.shape[1] - flags[:, ::-1].argmax(axis=1)
        return torch.from_numpy(np.where(flags.any(axis=1), places, 0))
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    # int32: [B, T] is large, and int64 takes several times as long
    return torch.where(mask, positions.int(), 0).amax(dim=1).long()


def at_places(tensor: Tensor, places: Tensor) -> Tensor:
    """The value of each row in one column. Args: tensor [B, T]; places [B] int64. Returns: [B]."""
    if isinstance(tensor, SpanTensor):
        of = tensor.spans
        column = np.repeat(places.numpy(), of.counts)
        within = np.concatenate([[0], ((of.begins <= column) & (column < of.ends)).cumsum()])
        inside = within[of.first[1:]] > within[of.first[:-1]]
        return torch.from_numpy(np.where(inside, tensor.of_rows, np.zeros_like(tensor.of_rows)))
    return tensor.gather(1, places[:, None]).squeeze(1)


def with_values(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of single numbers that leaves 0 as it is. Args: tensor [B, T]. Returns: [B, T]."""
    if isinstance(tensor, SpanTensor):
        values = change(torch.from_numpy(tensor.of_rows))
        return SpanTensor(tensor.spans, values.numpy(), tensor.shape[1], values.dtype)
    return by_rows(change, tensor, dtype=tensor.dtype)


def runs_of(tensor: Tensor) -> SpanTensor | None:
    """A plain tensor [B, T] as one value for the beginning of each row and 0 behind it; None where it is not of that form."""
    values = tensor.detach().numpy()
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    # -0.0 and every NaN are values of their own
    bits = np.ascontiguousarray(values).view(kinds[values.itemsize])
    used = bits != 0
    lengths = np.where(used.any(axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0)
    first = bits[:, :1]
    if not np.array_equal(used.sum(axis=1), lengths) or not np.array_equal(bits, np.where(used, first, 0)):
        return None
    spans = first_columns(torch.from_numpy(lengths), values.shape[1]).spans
    return SpanTensor(spans, values[:, 0].copy(), values.shape[1], tensor.dtype)


def first_values(values: Tensor, mask: Tensor) -> Tensor:
    """The value of each row at the first column that the mask selects, [B, 1]. Args: values and mask [B, T]."""
    return at_places(values, first_places(mask))[:, None]
