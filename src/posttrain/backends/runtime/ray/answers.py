"""Answers of the ranks of a group: each has stored the rows that it computed, and the driver joins their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.backends.runtime.ray.wire import from_plain, map_plain, to_plain
from posttrain.records.partial_tensors import PartialTensor
from posttrain.records.stored_rows import StoredArray
from posttrain.records.stored_tensors import StoredTensor, concatenated, stored_rows


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of a result [B, T] that one rank has computed, and their numbers."""

    rows: StoredTensor
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A rank's answer to a call of all ranks.

    Args: result, as a plain value, of the first rank; None of the others. parts, in the order of the result, in which the first
        rank's own stand where the whole belongs.
    """

    result: Any
    parts: tuple[Part, ...]


def answer_of(result: Any, lengths: Tensor, keep: Callable[[NDArray[Any]], StoredArray], *, first: bool) -> Answer:
    """Put the tensors [B, T] of a rank's result into the store: its own rows, or what only the first rank reports.

    Args: lengths [B] of the responses, 0 behind which the tensors are; keep puts an array into the store.
    """
    parts: list[Part] = []

    def kept(tensor: Tensor) -> Tensor:
        if isinstance(tensor, PartialTensor):
            parts.append(Part(stored_rows(tensor.own, lengths[list(tensor.of)], keep), tensor.of))
            return parts[-1].rows
        whole = first and tensor.ndim == 2 and len(tensor) == len(lengths)
        return stored_rows(tensor, lengths, keep) if whole else tensor

    stored = with_tensors(result, kept)
    return Answer(to_plain(stored) if first else None, tuple(parts))


def whole_of(answers: Sequence[Answer]) -> Any:
    """The first rank's result, with the rows of all ranks in the place of its own."""
    whole: dict[int, Tensor] = {}
    for number, own in enumerate(answers[0].parts):
        parts = [each.parts[number] for each in answers]
        order = torch.tensor([row for part in parts for row in part.numbers], dtype=torch.int64)
        whole[id(own.rows)] = concatenated([part.rows for part in parts])[order.argsort()]
    return with_tensors(from_plain(answers[0].result), lambda each: whole.get(id(each), each))


def with_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The record with changed tensors."""
    return from_plain(map_plain(record, change))
