"""Tensors [B, T] whose rows are a function of the same rows of other tensors, computed by whoever reads them.

    token_rewards = by_rows(partial(_less_kl, kl_coef=0.1), rewards, kl, mask)     # not computed yet
    sums = of_each_row(row_sums, token_rewards)                                    # [B, 1], by the processes that hold the rows

Where the log-probs and values of a step lie in an object store, the driver passes such a description on, and a rank computes
the rows that it trains on. Numbers over all tokens, such as the mean that advantages are whitened by, are added up from numbers
of each row in the order of the rows: one process and many ranks give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from posttrain.records.stored_rows import StoredArray
from posttrain.records.stored_tensors import StoredTensor, unread_rows
from posttrain.records.unread_tensors import UnreadTensor

# As interfaces.row_work.RowWork
OverRows = Callable[..., Tensor]


class ComputedTensor(UnreadTensor):
    """See the module.

    Args: of, a function of this package, or a ``partial`` of one, that computes each row by itself: [n, T] of the inputs' n rows.
        inputs [B, T] each, unread. width T and dtype, of the result.
    """

    of: Callable[..., Tensor]
    inputs: tuple[UnreadTensor, ...]

    @staticmethod
    def __new__(
        cls, of: Callable[..., Tensor], inputs: tuple[UnreadTensor, ...], width: int, dtype: torch.dtype
    ) -> ComputedTensor:
        made = cls._described(len(inputs[0]), width, dtype)
        made.of, made.inputs = of, inputs
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return ComputedTensor, (self.of, self.inputs, self.shape[1], self.dtype)

    def _made_full(self) -> Tensor:
        return self.of(*(each.read() for each in self.inputs))

    def rows(self, index: slice | Tensor) -> ComputedTensor:
        inputs = tuple(each.rows(index) for each in self.inputs)
        return ComputedTensor(self.of, inputs, self.shape[1], self.dtype)  # type: ignore[arg-type]

    def from_column(self, column: int) -> Tensor:
        return self.read()[:, column:]

    def with_arrays(self, change: Callable[[StoredArray], StoredArray]) -> ComputedTensor:
        inputs = tuple(each.with_arrays(change) for each in self.inputs)
        return ComputedTensor(self.of, inputs, self.shape[1], self.dtype)

    def gathered(self) -> StoredTensor:
        """The values, computed here."""
        return unread_rows(self.read())


def lies_elsewhere(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor come from a store."""
    if isinstance(tensor, ComputedTensor):
        return any(map(lies_elsewhere, tensor.inputs))
    return isinstance(tensor, StoredTensor)


def by_rows(of: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``of(*inputs)``, [B, T] of this dtype: at once, or where an input lies elsewhere, by whoever reads rows of it.

    Args: of, as for ComputedTensor; inputs [B, T], which must not be edited afterwards.
    """
    if not any(map(lies_elsewhere, inputs)):
        return of(*(each.read() if isinstance(each, UnreadTensor) else each for each in inputs))
    unread = tuple(each if isinstance(each, UnreadTensor) else unread_rows(each) for each in inputs)
    return ComputedTensor(of, unread, inputs[0].shape[1], dtype)


def _in_this_process(of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return of(*tensors)


_OVER_ROWS: ContextVar[OverRows] = ContextVar("who computes numbers of rows", default=_in_this_process)


@contextmanager
def rows_computed_by(over_rows: OverRows) -> Iterator[None]:
    """Let ``of_each_row`` of this thread compute where the rows are."""
    before = _OVER_ROWS.set(over_rows)
    try:
        yield
    finally:
        _OVER_ROWS.reset(before)


def of_each_row(of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``of(*tensors)``, [B, k]: few numbers of each row, computed where the rows are. Args: as for interfaces.RowWork."""
    return _OVER_ROWS.get()(of, *tensors)
