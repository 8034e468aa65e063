"""Responses as columns: the tokens of many in two arrays, so that no message between processes is pickled token by token.

The arrays may lie in the object store instead, so that the driver knows of the tokens where they are, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from posttrain.records.from_columns import records_of
from posttrain.records.stored_rows import StoredArray, StoredRow, digest_of, digest_of_logprobs
from posttrain.records.trajectories import Trajectory, Unfinished

_TOKENS = ("token_ids", "logprobs")
R = TypeVar("R", Trajectory, Unfinished)


def _defaults_of(kind: type[Trajectory] | type[Unfinished]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
        if field.name not in _TOKENS
    }


_DEFAULTS = {kind.__name__: _defaults_of(kind) for kind in (Trajectory, Unfinished)}


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
    digests: tuple[bytes, ...]  # n

    def rows(self, lengths: NDArray[np.int64]) -> list[StoredRow]:
        places = zip(self.numbers.tolist(), self.starts.tolist(), lengths.tolist(), strict=True)
        return [
            StoredRow(self.arrays[n], start, length, digest)
            for (n, start, length), digest in zip(places, self.digests, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Columns(Generic[R]):
    """Responses of one kind, in order. The values of the columns come back bit for bit."""

    kind: type[R]
    lengths: NDArray[np.int64]  # [n, 2], token ids and log-probs of each
    # Of one after the other: int32 where all fit; nats, float32 where that loses nothing
    token_ids: NDArray[Any] | StoredColumn
    logprobs: NDArray[Any] | StoredColumn
    # The other fields, n values each; a field that has its default in all of them is absent
    others: dict[str, list[Any]]


def to_columns(responses: Sequence[R], kind: type[R]) -> Columns[R]:
    lengths = np.array([(len(each.token_ids), len(each.logprobs)) for each in responses], np.int64).reshape(-1, 2)
    token_ids = np.fromiter(chain.from_iterable(each.token_ids for each in responses), np.int64, lengths[:, 0].sum())
    logprobs = np.fromiter(chain.from_iterable(each.logprobs for each in responses), np.float64, lengths[:, 1].sum())
    defaults = _DEFAULTS[kind.__name__]
    others = {name: [getattr(each, name) for each in responses] for name in defaults}
    return Columns(
        kind=kind,
        lengths=lengths,
        token_ids=_narrow(token_ids, np.int32),
        logprobs=_narrow(logprobs, np.float32),
        others={name: values for name, values in others.items() if any(v is not defaults[name] for v in values)},
    )


def stored(columns: Columns[R], keep: Callable[[NDArray[Any]], StoredArray]) -> Columns[R]:
    """The same responses with their tokens and log-probs in a store. Args: keep puts an array there."""
    token_ids, logprobs = columns.token_ids, columns.logprobs
    assert isinstance(token_ids, np.ndarray) and isinstance(logprobs, np.ndarray), "columns are stored once"
    return replace(
        columns,
        token_ids=_stored(token_ids, columns.lengths[:, 0], keep, digest_of),
        logprobs=_stored(logprobs, columns.lengths[:, 1], keep, digest_of_logprobs),
    )


def with_arrays(columns: Columns[R], change: Callable[[StoredArray], StoredArray]) -> Columns[R]:
    """The same responses, of arrays that hold the same values elsewhere; those that are not stored as they are."""

    def changed(column: NDArray[Any] | StoredColumn) -> NDArray[Any] | StoredColumn:
        if not isinstance(column, StoredColumn):
            return column
        return replace(column, arrays=tuple(map(change, column.arrays)))

    return replace(columns, token_ids=changed(columns.token_ids), logprobs=changed(columns.logprobs))


def _stored(
    flat: NDArray[Any],
    lengths: NDArray[np.int64],
    keep: Callable[[NDArray[Any]], StoredArray],
    digest: Callable[[NDArray[Any]], bytes],
) -> StoredColumn:
    from posttrain.records.stored_tensors import in_arrays  # needs torch, which a worker without a model does not load

    arrays, numbers, starts = in_arrays(flat, lengths)
    bounds = pairwise(accumulate(lengths.tolist(), initial=0))
    digests = tuple(digest(flat[start:end]) for start, end in bounds)
    return StoredColumn(tuple(map(keep, arrays)), numbers, starts, digests)


def from_columns(columns: Columns[R]) -> list[R]:
    """The responses. Those of stored columns have rows in the store (records.stored_rows) for tuples."""
    token_ids, logprobs = (
        _values(columns.token_ids, columns.lengths[:, 0]),
        _values(columns.logprobs, columns.lengths[:, 1]),
    )
    values = {"token_ids": token_ids, "logprobs": logprobs, **columns.others}
    return records_of(columns.kind, values, len(columns.lengths))


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
