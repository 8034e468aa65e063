"""Tensors [B, T] that are described, and made full where their values are needed.

A description says where the values lie (records.stored_tensors), or what they follow from (records.span_tensors). To stages and
engines such a tensor is like any other: rows can be taken from it unread, and whatever else is done with it reads its values,
once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from posttrain.records.stored_rows import StoredArray


class UnreadTensor(Tensor):
    """See the module. On the CPU, without gradient."""

    _in_memory_values: Tensor | None

    @classmethod
    def _described(cls, rows: int, width: int, dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, (rows, width), dtype=dtype)
        made._in_memory_values = None
        return made

    def __init__(self, *description: object):
        super().__init__()

    def read(self) -> Tensor:
        """The values, as a tensor in memory."""
        if self._in_memory_values is None:
            self._in_memory_values = self._made_full()
        return self._in_memory_values

    @abstractmethod
    def _made_full(self) -> Tensor:
        """Compute or fetch the values, [B, T]."""

    @abstractmethod
    def rows(self, index: slice | Tensor) -> Tensor:
        """These rows, unread where that is possible. Args: index, a slice or [n] int64 or bool."""

    @abstractmethod
    def from_column(self, column: int) -> Tensor:
        """The columns from this one on, unread where that is possible. Args: column from 0 up to T."""

    def with_arrays(self, change: Callable[[StoredArray], StoredArray]) -> Self:
        """The same tensor, of arrays that hold the same values elsewhere; itself where no array is behind it."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _OF_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        if (
            function is Tensor.__getitem__
            and isinstance(args[0], UnreadTensor)
            and (taken := _rows_of(*args)) is not None
        ):
            return taken
        if _edits(function) and isinstance(args[0], UnreadTensor):
            raise RuntimeError("this tensor is described, not stored: edit a copy of it (tensor.clone())")
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


_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"
_EDITING = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _edits(function: Any) -> bool:
    """Tell whether a function of torch changes its first argument, as its name says: mul_, __setitem__, __imul__."""
    name = getattr(function, "__name__", "")
    return name in _EDITING or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _rows_of(tensor: UnreadTensor, index: Any) -> Tensor | None:
    """Take rows, and columns of them, from a tensor; None for other indices."""
    first, *others = index if isinstance(index, tuple) else (index,)
    stepless = isinstance(first, slice) and first.step in (None, 1)
    listed = isinstance(first, Tensor) and first.ndim == 1 and first.dtype in (torch.int64, torch.bool)
    # Rows and columns of single values
    in_pairs = listed and others and not isinstance(others[0], slice | int)
    if not (stepless or listed) or len(others) > 1 or in_pairs:
        return None
    rows = tensor.rows(first)
    if not others:
        return rows
    if not isinstance(rows, UnreadTensor):
        return rows[:, others[0]]
    begin = others[0].start if isinstance(others[0], slice) and others[0] == slice(others[0].start, None) else None
    if type(begin) is int and 0 <= begin <= tensor.shape[1]:
        return rows.from_column(begin)
    return rows.read()[:, others[0]]


def _in_memory(value: Any) -> Any:
    return value.read() if isinstance(value, UnreadTensor) else value
