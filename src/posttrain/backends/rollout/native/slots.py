"""Slots of keys and values: for each sequence a place in a pair of tensors per layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.recurrent import KeptStates

LENGTH_STEP = 16  # lengths are rounded up to it, so that the matrix library sees few shapes
GROWTH = 1.5  # of the number of slots
LENGTH_GROWTH = 1.125  # of their length: less, because products include the unused part
KERNELS_LENGTH_GROWTH = 2.0  # where kernels read what there is
TILED_LENGTH_GROWTH = 1.5
TILED_LENGTH = 64  # tokens that they have room for from the start
LENGTH_UNUSED = 0.25  # largest unused share of a slot's length


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Keys and values of one sequence, a pair by layer: [kv_heads, head_dim, N] and [kv_heads, N, head_dim]; and its states."""

    layers: dict[int, tuple[Tensor, Tensor]]
    states: KeptStates


class Slots:
    """Slots for the keys and values of sequences: a pair of tensors for each of the layers, which grow on demand.

    Keys are stored transposed, ``[slots, kv_heads, head_dim, length]``: queries of one token times such keys is the fastest
    decoding product on a CPU. Values are ``[slots, kv_heads, length, head_dim]``. Unwritten entries are 0, so that they can be
    multiplied by the weight 0 of masked positions. A product with a part of the length costs more than one with all of it
    (the matrix library copies the part first), so little unused length is allocated.
    """

    def __init__(
        self, *, layers: Iterable[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.slots, self.length = 0, 0  # how many, and the capacity of one, tokens
        shapes = self._shapes(0, 0)
        self.keys, self.values = (
            {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers} for shape in shapes
        )
        self.moves = 0  # times that they were allocated again
        self.unused_costs = device.type == "cpu"  # time, in every product
        self._length_growth = LENGTH_GROWTH if self.unused_costs else KERNELS_LENGTH_GROWTH
        self._first_length = 0  # tokens, where they may be so many

    def _shapes(self, slots: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a layer's keys and values."""
        return (slots, self.kv_heads, self.head_dim, length), (slots, self.kv_heads, length, self.head_dim)

    def _beginning(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the parts of some slots, [..., kv_heads, X, Y] each, that hold their first ``length`` tokens."""
        return keys[..., :length], values[..., :length, :]

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys, [kv_heads, head_dim, length], and values, [kv_heads, length, head_dim], of a slot."""
        return self._beginning(self.keys[layer][slot], self.values[layer][slot], length)

    def make_room(self, slots: int, length: int, *, most_slots: int | None = None, longest: int | None = None) -> None:
        """Grow to at least this many slots of at least this many tokens, with a reserve up to the bounds."""
        had_slots, had_length = self.slots, self.length
        if slots > had_slots:
            slots = max(slots, min(int(GROWTH * had_slots), slots if most_slots is None else most_slots))
        if length > had_length:
            more = max(int(self._length_growth * had_length), self._first_length)
            length = rounded_up(max(length, more if longest is None else min(more, longest)))
        self._resize(max(slots, had_slots), max(length, had_length))

    def trim(self, length: int) -> None:
        """Free the memory after ``length`` tokens in every slot, when that is much."""
        if self.unused_costs and length < (1 - LENGTH_UNUSED) * self.length:
            self._resize(self.slots, rounded_up(length))

    def _resize(self, slots: int, length: int) -> None:
        """Reallocate layer by layer, so that only one layer exists twice."""
        had_slots, had_length = self.slots, self.length
        if (slots, length) == (had_slots, had_length):
            return
        self.moves += 1
        self.slots, self.length = slots, length
        of_keys, of_values = self._shapes(slots, length)
        for layer in self.keys:
            old = self.keys[layer], self.values[layer]
            new = self._allocate(old[0], of_keys), self._allocate(old[1], of_values)
            kept = min(length, had_length)
            for to, source in zip(self._beginning(*new, kept), self._beginning(*old, kept), strict=True):
                to[:had_slots] = source
            self.keys[layer], self.values[layer] = new

    def _allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return like.new_zeros(shape)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot over another."""
        if not length:
            return  # the slot may not have been allocated
        for layer, keys in self.keys.items():
            for kept in self._beginning(keys, self.values[layer], length):
                kept[target] = kept[source]


class TiledSlots(Slots):
    """Slots whose numbers lie in the order in which compiled kernels read them, so that they come from memory in one stream.

    Keys are ``[slots, kv_heads, length / LENGTH_STEP, width * LENGTH_STEP]``, where the width is the head_dim in whole steps:
    ``step`` numbers of the first of LENGTH_STEP keys, of the second, ..., and the next numbers. Values are ``[slots, kv_heads,
    length / step, head_dim * step]``: the first number of ``step`` tokens, the second, .... Kernels read no unwritten entries.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        step: int,
    ):
        self.step = step
        super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
        self.unused_costs = False
        self._length_growth, self._first_length = TILED_LENGTH_GROWTH, TILED_LENGTH

    def _shapes(self, slots: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        width = -(-self.head_dim // self.step) * self.step
        of_keys = slots, self.kv_heads, length // LENGTH_STEP, width * LENGTH_STEP
        return of_keys, (slots, self.kv_heads, length // self.step, self.head_dim * self.step)

    def _beginning(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return keys[..., : -(-length // LENGTH_STEP), :], values[..., : -(-length // self.step), :]

    def _allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return like.new_empty(shape)  # memory that is not written is not taken

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self._beginning(self.keys[layer][slot], self.values[layer][slot], length)
        tiles = keys.reshape(self.kv_heads, keys.shape[1], -1, LENGTH_STEP, self.step)
        in_rows = tiles.permute(0, 2, 4, 1, 3).reshape(self.kv_heads, -1, keys.shape[1] * LENGTH_STEP)
        pairs = values.reshape(self.kv_heads, values.shape[1], self.head_dim, self.step).transpose(2, 3)
        return in_rows[:, : self.head_dim, :length], pairs.reshape(self.kv_heads, -1, self.head_dim)[:, :length]


def rounded_up(length: int) -> int:
    """Return the next length in whole steps."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP
