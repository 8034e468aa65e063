"""Products with copies of weights that are kept from one stream to the next: packing them takes as long as several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.backends.rollout.native.packed_products import Product, Stack
from posttrain.backends.rollout.native.products import copies_weights, stacked_product

# An integer type for the sums of rows, by the largest number of bytes that divides a row
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Numbers of a tensor that differ once it has changed since it was copied.

    torch counts its own operations on a tensor, but neither compiled code that writes to its memory nor ``tensor.data``. These
    change the sums of its rows, as integers, which take a seventh of the time of packing.
    """

    operations: int
    sums: Tensor  # [rows] int64, of the rows' bits

    @classmethod
    def of(cls, tensor: Tensor) -> _Mark:
        rows = tensor.detach().reshape(len(tensor), -1).contiguous()
        row_bytes = rows.shape[1] * rows.element_size()
        words = WORDS[next(size for size in WORDS if row_bytes % size == 0)]
        return cls(0 if tensor.is_inference() else tensor._version, rows.view(words).sum(dim=1))

    def same(self, other: _Mark) -> bool:
        return self.operations == other.operations and torch.equal(self.sums, other.sums)


class KeptProducts:
    """A ``Stack`` that makes a product again only when its weights have changed since. One reading of a model asks for its
    products in the same order as every other.

    Products that hold no copies are made at every reading, which takes no time.
    """

    def __init__(self, stack: Stack):
        self._stack = stack
        self._kept: list[tuple[list[_Mark], Product] | None] = []
        self._next = 0

    def begin(self) -> None:
        """Begin a reading of the model's weights."""
        self._next = 0

    def clear(self) -> None:
        """Free the copies."""
        self._kept.clear()

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
        if self._stack is stacked_product and not copies_weights(weights):
            return self._stack(weights, biases)
        marks = [_Mark.of(each) for each in (*weights, *biases) if each is not None]
        place, self._next = self._next, self._next + 1
        if place == len(self._kept):
            self._kept.append(None)
        kept = self._kept[place]
        if kept is not None and len(kept[0]) == len(marks) and all(map(_Mark.same, kept[0], marks)):
            return kept[1]
        self._kept[place] = kept = None  # frees the old copy first
        product = self._stack(weights, biases)
        self._kept[place] = marks, product
        return product
