"""Tensors of a batch whose values lie in stored arrays, or follow from a number per row: [B, T] of a few numbers a row.

To stages and engines they are tensors like any other. Rows can be taken from one without a look at its values; everything else
reads them, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from posttrain.records.stored_rows import HeldArray, StoredArray, StoredRow

ARRAY_BYTES = 1 << 20  # of a stored array, about: a reader of few rows fetches little more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """A stretch of values in every row of a batch; the other columns of the row are not described.

    Row i has, from ``columns[i]`` on, the ``lengths[i]`` values of ``arrays[numbers[i]]`` from ``starts[i]`` on; where
    ``repeated``, the first of them so many times.
    """

    arrays: tuple[StoredArray, ...]
    numbers: NDArray[np.int32]  # [B]
    starts: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int32]  # [B]
    columns: NDArray[np.int32]  # [B]
    repeated: bool = False

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
        counts = np.minimum(self.lengths, 1) if self.repeated else self.lengths
        places = zip(self.numbers.tolist(), self.starts.tolist(), counts.tolist(), strict=True)
        pieces = [found[number][start : start + count] for number, start, count in places]
        values = np.concatenate(pieces) if pieces else np.zeros(0)
        numbers, starts = np.zeros_like(self.numbers), np.cumsum(counts, dtype=np.int64) - counts
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
                end = start + (1 if self.repeated else length)
                row[column : column + length] = found[number][start:end]


class StoredTensor(Tensor):
    """See the module. Args: parts, the stretches of each row, which do not overlap; 0 in between. width T; dtype of the values.

    On the CPU, without gradient. Its values must not be edited.
    """

    parts: tuple[Stretches, ...]
    _in_memory_values: Tensor | None

    @staticmethod
    def __new__(cls, parts: tuple[Stretches, ...], width: int, dtype: torch.dtype) -> StoredTensor:
        shape = len(parts[0].lengths), width
        made: StoredTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.parts, made._in_memory_values = parts, None
        return made

    def __init__(self, *description: object):
        super().__init__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredTensor, (self.parts, self.shape[1], self.dtype)

    def read(self) -> Tensor:
        """The values, as a tensor in memory."""
        if self._in_memory_values is None:
            values = torch.zeros(self.shape, dtype=self.dtype)
            for part in self.parts:
                part.write(values.numpy())
            self._in_memory_values = values
        return self._in_memory_values

    def rows(self, index: slice | Tensor) -> StoredTensor:
        """These rows, unread. Args: index, a slice or [n] int64 or bool."""
        chosen = index if isinstance(index, slice) else np.arange(len(self))[index.numpy()]
        return StoredTensor(tuple(part.rows(chosen) for part in self.parts), self.shape[1], self.dtype)

    def gathered(self) -> StoredTensor:
        """The same tensor, of arrays of this process that hold its values and no others."""
        return StoredTensor(tuple(part.gathered() for part in self.parts), self.shape[1], self.dtype)

    def from_column(self, column: int) -> Tensor:
        """The columns from this one on; unread, where no stretch is cut by it. Args: column from 0 up to T."""
        parts = [part.from_column(column) for part in self.parts]
        kept = tuple(part for part in parts if part is not None)
        if len(kept) < len(parts):
            return self.read()[:, column:]
        return StoredTensor(kept, self.shape[1] - column, self.dtype)

    def with_arrays(self, change: Callable[[StoredArray], StoredArray]) -> StoredTensor:
        """The same tensor, of arrays that hold the same values elsewhere."""
        parts = tuple(replace(part, arrays=tuple(map(change, part.arrays))) for part in self.parts)
        return StoredTensor(parts, self.shape[1], self.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _OF_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        if (
            function is Tensor.__getitem__
            and isinstance(args[0], StoredTensor)
            and (taken := _rows_of(*args)) is not None
        ):
            return taken
        return function(*tree_map(_in_memory, args), **tree_map(_in_memory, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*tree_map(_in_memory, args), **tree_map(_in_memory, kwargs or {}))


# All that is known of a tensor without its values.
_OF_NO_VALUE = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "nbytes")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.__hash__),
}


def _rows_of(tensor: StoredTensor, index: Any) -> Tensor | None:
    """Take rows, and columns of them, from a tensor; None for other indices."""
    first, *others = index if isinstance(index, tuple) else (index,)
    stepless = isinstance(first, slice) and first.step in (None, 1)
    listed = isinstance(first, Tensor) and first.ndim == 1 and first.dtype in (torch.int64, torch.bool)
    if not (stepless or listed) or len(others) > 1:
        return None
    rows = tensor.rows(first)
    if not others:
        return rows
    begin = others[0].start if isinstance(others[0], slice) and others[0] == slice(others[0].start, None) else None
    if type(begin) is int and 0 <= begin <= tensor.shape[1]:
        return rows.from_column(begin)
    return rows.read()[:, others[0]]


def _in_memory(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value


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


def runs_of(tensor: Tensor) -> StoredTensor | None:
    """The tensor [B, T] as one value for the beginning of each row and 0 behind it; None where it is not of that form.

    Masks of single-turn responses are, and what is the same for all tokens of a response: 12 bytes a row instead of T values.
    """
    values = tensor.detach().numpy()
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    # -0.0 and every NaN are values of their own
    bits = np.ascontiguousarray(values).view(kinds[values.itemsize])
    used = bits != 0
    lengths = np.where(used.any(axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0)
    first = bits[:, :1]
    if not np.array_equal(used.sum(axis=1), lengths) or not np.array_equal(bits, np.where(used, first, 0)):
        return None
    count = len(values)
    part = Stretches(
        arrays=(HeldArray(values[:, 0].copy()),),
        numbers=np.zeros(count, np.int32),
        starts=np.arange(count),
        lengths=lengths.astype(np.int32),
        columns=np.zeros(count, np.int32),
        repeated=True,
    )
    return StoredTensor((part,), values.shape[1], tensor.dtype)


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
