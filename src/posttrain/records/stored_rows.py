"""Values of responses that lie outside of this process, in an object store; read when somebody looks into them.

A worker that samples puts the tokens of many responses there as one array. The driver passes on where each response's stretch is,
and only the ranks that train a row read it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray


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


class StoredRow(Sequence[Any]):
    """A stretch of a stored array. It stands where a tuple of its numbers would, and reads like one.

    Args: digest, of the numbers (``digest_of``), where they are token ids.
    """

    __slots__ = ("array", "digest", "length", "start")

    def __init__(self, values: StoredArray, start: int, length: int, digest: bytes = b""):
        self.array, self.start, self.length, self.digest = values, start, length, digest

    def values(self) -> NDArray[Any]:
        return self.array.read()[self.start : self.start + self.length]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values().tolist())

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self) + other

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return other + tuple(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values(), dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def digest_of(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Return 16 bytes that are equal for equal token ids; those that a stored row carries are not computed again."""
    if isinstance(token_ids, StoredRow) and token_ids.digest:
        return token_ids.digest
    # array makes a quarter of NumPy's time of a tuple
    numbers = token_ids.astype(np.int64) if isinstance(token_ids, np.ndarray) else array("q", token_ids)
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


def equal_keys(rows: Sequence[Sequence[int]]) -> Sequence[Hashable]:
    """Return a key for each row of token ids: equal ones for equal rows. Rows that are tuples are keys themselves, which takes
    a fraction of the time of a digest."""
    if all(type(row) is tuple for row in rows):
        return cast("Sequence[Hashable]", rows)
    return [digest_of(row) for row in rows]
