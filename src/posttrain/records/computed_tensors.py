"""Tensors [B, T] whose rows are a function of the same rows of other tensors, computed by whoever reads them.

    token_rewards = by_rows(partial(_less_kl, kl_coef=0.1), rewards, kl, mask)     # not computed yet
    sums = of_each_row(row_sums, token_rewards)                                    # [B, 1], by the processes that hold the rows

Where the log-probs and values of a step lie in an object store, the driver passes such a description on, and a rank computes
the rows that it trains on. Numbers over all tokens, such as the mean that advantages are whitened by, are added up from numbers
of each row in the order of the rows: one process and many ranks give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
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


# A function as for interfaces.RowWork, and the tensors that it reads
RowQuestion = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def of_each_row_together(questions: Sequence[RowQuestion], over_rows: OverRows | None = None) -> list[Tensor]:
    """Answer several questions about rows, each as ``of_each_row`` does. Those about equally many rows, of which some lie
    elsewhere, are one call.

    Args: over_rows, None: as ``of_each_row``. Returns: a tensor [B, k] for each, with the bits that it has alone.
    """
    compute = over_rows or _OVER_ROWS.get()
    answers: dict[int, Tensor] = {}
    asked: dict[int, list[int]] = {}  # numbers of the questions, by the number of rows
    for number, (of, tensors) in enumerate(questions):
        if any(map(lies_elsewhere, tensors)):
            asked.setdefault(len(tensors[0]), []).append(number)
        else:
            answers[number] = compute(of, *tensors)
    for numbers in asked.values():
        if len(numbers) == 1:
            of, tensors = questions[numbers[0]]
            answers[numbers[0]] = compute(of, *tensors)
            continue
        whole: dict[int, Tensor] = {id(each): each for number in numbers for each in questions[number][1]}
        places = {key: place for place, key in enumerate(whole)}
        named = [(questions[number][0], tuple(places[id(each)] for each in questions[number][1])) for number in numbers]
        table = compute(partial(_tables, named), *whole.values())
        answers |= zip(numbers, _apart(table), strict=True)
    return [answers[number] for number in range(len(questions))]


def _tables(of: Sequence[tuple[Callable[..., Tensor], tuple[int, ...]]], *tensors: Tensor) -> Tensor:
    """The answers of several functions beside each other in float64, which holds all of float32, each behind a column with its
    number of columns, less than nothing where they are of float32. Args: of, functions and the places of what they read."""
    parts = []
    for function, places in of:
        found = function(*(tensors[place] for place in places))
        width = found.shape[1] if found.dtype == torch.float64 else -found.shape[1]
        parts += [torch.full((len(found), 1), float(width), dtype=torch.float64), found.double()]
    return torch.cat(parts, dim=1)


def _apart(table: Tensor) -> list[Tensor]:
    """The answers in what ``_tables`` has returned."""
    found, column = [], 0
    while column < table.shape[1]:
        width = int(table[0, column])
        part = table[:, column + 1 : column + 1 + abs(width)]
        found.append(part if width > 0 else part.float())
        column += 1 + abs(width)
    return found
