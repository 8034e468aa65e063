"""Messages of workers with responses, whose tokens and log-probs lie in the object store or in arrays beside the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

from numpy.typing import NDArray

from posttrain.backends.runtime.ray.columns import ArrayBeside, Columns, from_columns, stored, to_columns, with_arrays
from posttrain.records.stored_rows import StoredArray
from posttrain.records.trajectories import Trajectory, Unfinished

M = TypeVar("M")
Keep = Callable[[NDArray[Any]], StoredArray]


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Generic[M]):
    """A record on its way to the driver, with the responses in its fields as columns."""

    message: M  # with () in the place of responses
    columns: dict[str, Columns[Any]]  # of these, by field
    beside: tuple[NDArray[Any], ...] = ()  # what an ArrayBeside of the columns stands for

    @classmethod
    def of(cls, message: Any, keep: Keep | None = None) -> Self:
        """Pack a record, a dataclass whose fields may be tuples of responses of one kind.

        Args: keep puts an array into the object store, where the tokens are to lie; None: they go along.
        """
        columns: dict[str, Columns[Any]] = {}
        for field in fields(message):
            value = getattr(message, field.name)
            if type(value) is tuple and value and type(value[0]) in (Trajectory, Unfinished):
                found: Columns[Any] = to_columns(value, type(value[0]))
                columns[field.name] = stored(found, keep) if keep else found
        return cls(replace(message, **dict.fromkeys(columns, ())), columns)

    @classmethod
    def with_beside(cls, message: Any) -> Self:
        """The same, with tokens and log-probs in arrays that travel beside it."""
        arrays: list[NDArray[Any]] = []

        def keep(values: NDArray[Any]) -> StoredArray:
            arrays.append(values)
            return ArrayBeside(len(arrays) - 1)

        return replace(cls.of(message, keep), beside=tuple(arrays))

    def parted(self) -> tuple[Self, tuple[NDArray[Any], ...]]:
        """The message without the arrays beside it, and these."""
        return replace(self, beside=()), self.beside

    def joined(self, array_of: Callable[[int], StoredArray]) -> Self:
        """The message with stored arrays in the place of those beside it. Args: array_of gives the one with a number."""

        def found(given: StoredArray) -> StoredArray:
            return array_of(given.number) if isinstance(given, ArrayBeside) else given

        return replace(self, columns={name: with_arrays(each, found) for name, each in self.columns.items()})

    def unpacked(self) -> M:
        """The record. Responses whose columns are stored have rows in the store for tuples."""
        responses: dict[str, Any] = {name: tuple(from_columns(each)) for name, each in self.columns.items()}
        return replace(self.message, **responses)  # type: ignore[type-var]
