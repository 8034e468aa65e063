"""Values of responses that lie outside of this process, in an object store; read when somebody looks into them.

A worker that samples puts the tokens of many responses there as one array. The driver passes on where each response's stretch is,
and only the ranks that train a row read it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class StoredArray(Protocol):
    """A flat array, which may lie in another process."""

    def read(self) -> NDArray[Any]:
        """Fetch the values, read-only."""
        ...


class HeldArray:
    """See StoredArray. An array of this process."""

    def __init__(self, values: NDArray[Any]):
        self._values = values

    def read(self) -> NDArray[Any]:
        return self._values


class UnreadRow(Sequence[Any]):
    """Numbers that are read when somebody looks into them. They stand where a tuple would, and read like one."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self) + other

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return other + tuple(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class StoredRow(UnreadRow):
    """A stretch of a stored array. It stands where a tuple of its numbers would, and reads like one.

    Args: digest, of the numbers (``digest_of``); b"": not known.
    """

    __slots__ = ("array", "digest", "length", "start")

    def __init__(self, values: StoredArray, start: int, length: int, digest: bytes = b""):
        self.array, self.start, self.length, self.digest = values, start, length, digest

    def values(self) -> NDArray[Any]:
        return self.array.read()[self.start : self.start + self.length]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values().tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values(), dtype)


class RowOfPieces(UnreadRow):
    """Numbers that came in pieces, one after another: tuples or rows."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: tuple[Sequence[Any], ...]):
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.pieces)


def lengthened(row: tuple[T, ...], more: tuple[T, ...]) -> tuple[T, ...]:
    """A row with further numbers behind it: a tuple where both are, and otherwise pieces that are not read.

    Rows that stand for tuples have their types in records (records.trajectories).
    """
    if type(row) is tuple and type(more) is tuple:
        return row + more
    pieces = [piece for each in (row, more) for piece in (each.pieces if isinstance(each, RowOfPieces) else (each,))]
    return cast("tuple[T, ...]", RowOfPieces(tuple(piece for piece in pieces if len(piece))))


def digest_of(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Return 16 bytes that are equal for equal token ids; those that a stored row carries are not computed again."""
    return _digest_of(token_ids, "q")


def digest_of_logprobs(logprobs: Sequence[float] | NDArray[Any]) -> bytes:
    """Return the same of log-probs, bit for bit as float64."""
    return _digest_of(logprobs, "d")


def _digest_of(values: Sequence[float] | NDArray[Any], code: str) -> bytes:
    """Args: code of the numbers' type, as in ``array``."""
    if isinstance(values, StoredRow) and values.digest:
        return values.digest
    # array makes a quarter of NumPy's time of a tuple
    numbers = values.astype(code) if isinstance(values, np.ndarray) else array(code, values)
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


def equal_keys(rows: Sequence[Sequence[int]]) -> Sequence[Hashable]:
    """Return a key for each row of token ids: equal ones for equal rows. Rows that are tuples are keys themselves, which takes
    a fraction of the time of a digest."""
    if all(type(row) is tuple for row in rows):
        return cast("Sequence[Hashable]", rows)
    return [digest_of(row) for row in rows]
