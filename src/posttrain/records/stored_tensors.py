"""Tensors of a batch whose values lie in stored arrays, in other processes: [B, T] of a few numbers a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.records.stored_rows import HeldArray, StoredArray, StoredRow
from posttrain.records.unread_tensors import UnreadTensor

ARRAY_BYTES = 1 << 20  # of a stored array, about: a reader of few rows fetches little more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """A stretch of values in every row of a batch; the other columns of the row are not described.

    Row i has, from ``columns[i]`` on, the ``lengths[i]`` values of ``arrays[numbers[i]]`` from ``starts[i]`` on.
    """

    arrays: tuple[StoredArray, ...]
    numbers: NDArray[np.int32]  # [B]
    starts: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int32]  # [B]
    columns: NDArray[np.int32]  # [B]

    def rows(self, index: NDArray[np.int64] | slice) -> Self:
        """The stretches of these rows, with the arrays that they need."""
        needed, numbers = np.unique(self.numbers[index], return_inverse=True)
        return replace(
            self,
            arrays=tuple(self.arrays[number] for number in needed),
            numbers=numbers.astype(np.int32),
            starts=self.starts[index],
            lengths=self.lengths[index],
            columns=self.columns[index],
        )

    def gathered(self) -> Self:
        """The same stretches in one array of this process, which holds nothing else."""
        found = [each.read() for each in self.arrays]
        places = zip(self.numbers.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        pieces = [found[number][start : start + count] for number, start, count in places]
        values = np.concatenate(pieces) if pieces else np.zeros(0)
        numbers, starts = np.zeros_like(self.numbers), np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return replace(self, arrays=(HeldArray(values),), numbers=numbers, starts=starts)

    def from_column(self, column: int) -> Self | None:
        """The stretches with a column as the first, or those that end before it as empty ones; None where it cuts some."""
        if np.all((self.columns >= column) | (self.lengths == 0)):
            return replace(self, columns=np.maximum(self.columns - column, 0))
        if np.all(self.columns + self.lengths <= column):
            empty = np.zeros_like(self.lengths)
            return replace(self, arrays=(HeldArray(np.zeros(0)),), numbers=empty, lengths=empty, columns=empty)
        return None

    def write(self, rows: NDArray[Any]) -> None:
        """Write the values into rows, [B, T]."""
        found = [each.read() for each in self.arrays]
        places = zip(
            self.numbers.tolist(), self.starts.tolist(), self.lengths.tolist(), self.columns.tolist(), strict=True
        )
        for row, (number, start, length, column) in zip(rows, places, strict=True):
            if length:
                row[column : column + length] = found[number][start : start + length]


class StoredTensor(UnreadTensor):
    """See the module. Args: parts, the stretches of each row, which do not overlap; 0 in between. width T; dtype."""

    parts: tuple[Stretches, ...]

    @staticmethod
    def __new__(cls, parts: tuple[Stretches, ...], width: int, dtype: torch.dtype) -> StoredTensor:
        made = cls._described(len(parts[0].lengths), width, dtype)
        made.parts = parts
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredTensor, (self.parts, self.shape[1], self.dtype)

    def _made_full(self) -> Tensor:
        values = torch.zeros(self.shape, dtype=self.dtype)
        for part in self.parts:
            part.write(values.numpy())
        return values

    def rows(self, index: slice | Tensor) -> StoredTensor:
        chosen = index if isinstance(index, slice) else np.arange(len(self))[index.numpy()]
        return StoredTensor(tuple(part.rows(chosen) for part in self.parts), self.shape[1], self.dtype)

    def gathered(self) -> StoredTensor:
        """The same tensor, of arrays of this process that hold its values and no others."""
        return StoredTensor(tuple(part.gathered() for part in self.parts), self.shape[1], self.dtype)

    def from_column(self, column: int) -> Tensor:
        """See UnreadTensor; unread where no stretch is cut by the column."""
        parts = [part.from_column(column) for part in self.parts]
        kept = tuple(part for part in parts if part is not None)
        if len(kept) < len(parts):
            return self.read()[:, column:]
        return StoredTensor(kept, self.shape[1] - column, self.dtype)

    def with_arrays(self, change: Callable[[StoredArray], StoredArray]) -> StoredTensor:
        parts = tuple(replace(part, arrays=tuple(map(change, part.arrays))) for part in self.parts)
        return StoredTensor(parts, self.shape[1], self.dtype)


def stored_rows(values: Tensor, lengths: Tensor, keep: Callable[[NDArray[Any]], StoredArray]) -> StoredTensor:
    """Put a tensor into a store. Args: values [B, T], 0 beyond the first ``lengths`` [B] of a row; keep puts an array there."""
    of = lengths.numpy()
    flat = values.detach().numpy()[np.arange(values.shape[1]) < of[:, None]]
    arrays, numbers, starts = in_arrays(flat, of)
    columns = np.zeros(len(of), np.int32)
    part = Stretches(
        arrays=tuple(map(keep, arrays)), numbers=numbers, starts=starts, lengths=of.astype(np.int32), columns=columns
    )
    return StoredTensor((part,), values.shape[1], values.dtype)


def unread_rows(tensor: Tensor) -> StoredTensor:
    """A plain tensor [B, T], of which rows that are taken are copied when they are read. It must not be edited."""
    count, width = tensor.shape
    part = Stretches(
        arrays=(HeldArray(tensor.detach().numpy().reshape(-1)),),
        numbers=np.zeros(count, np.int32),
        starts=np.arange(count, dtype=np.int64) * width,
        lengths=np.full(count, width, np.int32),
        columns=np.zeros(count, np.int32),
    )
    return StoredTensor((part,), width, tensor.dtype)


def in_arrays(
    flat: NDArray[Any], lengths: NDArray[np.int64]
) -> tuple[list[NDArray[Any]], NDArray[np.int32], NDArray[np.int64]]:
    """Cut stretches that stand one after another into arrays of about ARRAY_BYTES, between stretches.

    Returns: the arrays, and for each stretch the number of its array and where it starts there.
    """
    ends = lengths.cumsum()
    starts = ends - lengths
    _, first, numbers = np.unique(starts * flat.itemsize // ARRAY_BYTES, return_index=True, return_inverse=True)
    begins = starts[first]
    return np.split(flat, begins[1:]), numbers.astype(np.int32), starts - begins[numbers]


def padded(*parts: tuple[Sequence[Sequence[float]], Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """Rows of values beside each other as one tensor [B, T], 0 in between; unread where some of them are stored.

    Args: parts, B rows and the columns [B] at which they begin, of each; width T.
    """
    whole = StoredTensor(tuple(_stretches(rows, columns, dtype) for rows, columns in parts), width, dtype)
    return whole if any(type(row) is StoredRow for rows, _ in parts for row in rows) else whole.read()


def _stretches(rows: Sequence[Sequence[float]], columns: Tensor, dtype: torch.dtype) -> Stretches:
    """Describe rows. Those that are not stored are held in one array of this process, equal objects once."""
    # A StoredRow is compared by its type, because isinstance of an abstract sequence takes many times as long
    others = {id(row): row for row in rows if type(row) is not StoredRow}
    precise = np.float64 if dtype.is_floating_point else np.int64
    values = np.fromiter(chain.from_iterable(others.values()), precise, sum(map(len, others.values())))
    here = HeldArray(values)
    starts = accumulate(map(len, others.values()), initial=0)
    held = {key: StoredRow(here, start, len(row)) for (key, row), start in zip(others.items(), starts, strict=False)}
    found = [row if type(row) is StoredRow else held[id(row)] for row in rows]
    numbers: dict[StoredArray, int] = {}
    of = [numbers.setdefault(row.array, len(numbers)) for row in found]
    return Stretches(
        arrays=tuple(numbers),
        numbers=np.array(of, np.int32),
        starts=np.array([row.start for row in found], np.int64),
        lengths=np.array([row.length for row in found], np.int32),
        columns=columns.numpy().astype(np.int32),
    )


def concatenated(parts: Sequence[StoredTensor]) -> StoredTensor:
    """The rows of several tensors of one part each, one below the other."""
    widest = max(each.shape[1] for each in parts)
    pieces = [each.parts[0] for each in parts]
    offsets = np.cumsum([0, *(len(piece.arrays) for piece in pieces[:-1])])
    part = Stretches(
        arrays=tuple(each for piece in pieces for each in piece.arrays),
        numbers=np.concatenate([piece.numbers + offset for piece, offset in zip(pieces, offsets, strict=True)]).astype(
            np.int32
        ),
        starts=np.concatenate([piece.starts for piece in pieces]),
        lengths=np.concatenate([piece.lengths for piece in pieces]),
        columns=np.concatenate([piece.columns for piece in pieces]),
    )
    return StoredTensor((part,), widest, parts[0].dtype)
