"""Responses as columns: the tokens of many in two arrays, so that no message between processes is pickled token by token.

The arrays may lie in the object store instead, so that the driver knows of the tokens where they are, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.records.stored_rows import StoredArray, StoredRow, digest_of
from posttrain.records.trajectories import Trajectory

_TOKENS = ("token_ids", "logprobs")
_DEFAULTS = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(Trajectory)
    if field.name not in _TOKENS
}


@dataclass(frozen=True, slots=True)
class ArrayBeside:
    """See StoredArray: the array with this number among those that travel beside a message."""

    number: int

    def read(self) -> NDArray[Any]:
        raise RuntimeError("the arrays beside a message have not been joined with it")


@dataclass(frozen=True, slots=True, eq=False)
class StoredColumn:
    """A column in the object store, and where the stretch of each trajectory is."""

    arrays: tuple[StoredArray, ...]
    numbers: NDArray[np.int32]  # [n], of its array
    starts: NDArray[np.int64]  # [n]
    digests: tuple[bytes, ...]  # n of token ids; () of log-probs

    def rows(self, lengths: NDArray[np.int64]) -> list[StoredRow]:
        places = zip(self.numbers.tolist(), self.starts.tolist(), lengths.tolist(), strict=True)
        digests = self.digests or repeat(b"")
        return [
            StoredRow(self.arrays[n], start, length, digest)
            for (n, start, length), digest in zip(places, digests, strict=False)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Trajectories, in order. The values of the columns come back bit for bit."""

    lengths: NDArray[np.int64]  # [n, 2], token ids and log-probs of each
    # Of one after the other: int32 where all fit; nats, float32 where that loses nothing
    token_ids: NDArray[Any] | StoredColumn
    logprobs: NDArray[Any] | StoredColumn
    # The other fields, n values each; a field that has its default in all of them is absent
    others: dict[str, list[Any]]


def to_columns(trajectories: Sequence[Trajectory]) -> Columns:
    lengths = np.array([(len(each.token_ids), len(each.logprobs)) for each in trajectories], np.int64).reshape(-1, 2)
    token_ids = np.fromiter(chain.from_iterable(each.token_ids for each in trajectories), np.int64, lengths[:, 0].sum())
    logprobs = np.fromiter(chain.from_iterable(each.logprobs for each in trajectories), np.float64, lengths[:, 1].sum())
    others = {name: [getattr(each, name) for each in trajectories] for name in _DEFAULTS}
    return Columns(
        lengths=lengths,
        token_ids=_narrow(token_ids, np.int32),
        logprobs=_narrow(logprobs, np.float32),
        others={name: values for name, values in others.items() if any(v is not _DEFAULTS[name] for v in values)},
    )


def stored(columns: Columns, keep: Callable[[NDArray[Any]], StoredArray]) -> Columns:
    """The same trajectories with their tokens and log-probs in a store. Args: keep puts an array there."""
    token_ids, logprobs = columns.token_ids, columns.logprobs
    assert isinstance(token_ids, np.ndarray) and isinstance(logprobs, np.ndarray), "columns are stored once"
    bounds = pairwise(accumulate(columns.lengths[:, 0].tolist(), initial=0))
    digests = tuple(digest_of(token_ids[start:end]) for start, end in bounds)
    return replace(
        columns,
        token_ids=_stored(token_ids, columns.lengths[:, 0], keep, digests),
        logprobs=_stored(logprobs, columns.lengths[:, 1], keep),
    )


def with_arrays(columns: Columns, change: Callable[[StoredArray], StoredArray]) -> Columns:
    """The same trajectories, of arrays that hold the same values elsewhere; those that are not stored as they are."""

    def changed(column: NDArray[Any] | StoredColumn) -> NDArray[Any] | StoredColumn:
        if not isinstance(column, StoredColumn):
            return column
        return replace(column, arrays=tuple(map(change, column.arrays)))

    return replace(columns, token_ids=changed(columns.token_ids), logprobs=changed(columns.logprobs))


def _stored(
    flat: NDArray[Any],
    lengths: NDArray[np.int64],
    keep: Callable[[NDArray[Any]], StoredArray],
    digests: tuple[bytes, ...] = (),
) -> StoredColumn:
    from posttrain.records.stored_tensors import in_arrays  # needs torch, which a worker without a model does not load

    arrays, numbers, starts = in_arrays(flat, lengths)
    return StoredColumn(tuple(map(keep, arrays)), numbers, starts, digests)


def from_columns(columns: Columns) -> list[Trajectory]:
    """The trajectories. Those of stored columns have rows in the store (records.stored_rows) for tuples."""
    rows = zip(*columns.others.values(), strict=True)
    values = (_values(columns.token_ids, columns.lengths[:, 0]), _values(columns.logprobs, columns.lengths[:, 1]))
    return [
        Trajectory(token_ids=token_ids, logprobs=logprobs, **dict(zip(columns.others, row, strict=True)))
        for token_ids, logprobs, row in zip(*values, rows, strict=True)
    ]


def _values(column: NDArray[Any] | StoredColumn, lengths: NDArray[np.int64]) -> list[Any]:
    """The numbers of each trajectory, in the form of a tuple or of what reads like one."""
    if isinstance(column, StoredColumn):
        return column.rows(lengths)
    plain = column.tolist()
    return [tuple(plain[start:end]) for start, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def _narrow(values: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    """The values in a smaller type, or as they are where one of them has no exact form in it."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
    return narrow if np.array_equal(narrow, values, equal_nan=values.dtype.kind == "f") else values
