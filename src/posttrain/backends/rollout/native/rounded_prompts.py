"""Keys and values of prompts as whole numbers, beside those of the cache, for processors that multiply these faster.

All samples of a prompt read its keys and values at every token. They are rounded once, when the first of these tokens is decoded,
and kept in the order in which products read them (rounded.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from posttrain.backends.rollout.native.slots import LENGTH_STEP, Slots

ADDRESSES = ("rounded_keys", "rounded_values", "key_scales", "value_scales")


class _Rounding(ctypes.Structure):
    """Arguments of the kernel, as in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("parts", "kv_heads", "dim", "room")),
        *((name, ctypes.c_void_p) for name in ("slots", "firsts", "lasts", "keys", "values", *ADDRESSES)),
    )


class RoundingKernel:
    """Rounds keys and values of prompts. ``used`` is False where attention reads them as they are."""

    def __init__(self, library: ctypes.CDLL, dtype: str):
        rounds, self._round = (getattr(library, f"{name}_{dtype}") for name in ("rounds", "round"))
        self.used = bool(rounds())
        self._round.argtypes, self._round.restype = (ctypes.POINTER(_Rounding), ctypes.c_int), None

    def __call__(self, parts: Tensor, keys: Tensor, values: Tensor, addresses: dict[str, int]) -> None:
        """Args: parts [3, n] int64: slot, first and last token of each, the first a multiple of LENGTH_STEP; keys, values: of
        all slots in a layer; addresses: of what is written."""
        _, kv_heads, dim, room = keys.shape
        given = (each.data_ptr() for each in (*parts, keys, values))
        self._round(_Rounding(parts.shape[1], kv_heads, dim, room, *given, **addresses), torch.get_num_threads())


class RoundedPrompts:
    """Rounded keys and values of the prompts in the slots of a cache."""

    def __init__(self, prompts: Slots, kernel: RoundingKernel):
        self._prompts, self._kernel = prompts, kernel
        self._moves = -1  # of the slots, when room was made last
        self._known: dict[int, int] = {}  # by slot: the number of tokens that are rounded
        self._tensors: list[Tensor] = []
        self.addresses: dict[int, dict[str, int]] = {}  # by layer: where its whole numbers and scales begin

    def forget(self, slot: int, after: int = 0) -> None:
        """Take note that a slot holds other tokens than before, but for so many at its beginning."""
        self._known[slot] = min(self._known.get(slot, 0), after)

    def update(self, prompts: Iterable[tuple[int, int]]) -> None:
        """Round what is new. Args: prompts, the slot and the number of tokens of each that is read."""
        if self._moves != self._prompts.moves:
            self._make_room()
        stale = sorted({(slot, tokens) for slot, tokens in prompts if tokens > self._known.get(slot, 0)})
        if not stale:
            return
        firsts = (self._known.get(slot, 0) // LENGTH_STEP * LENGTH_STEP for slot, _ in stale)
        parts = torch.tensor([(slot, first, last) for (slot, last), first in zip(stale, firsts, strict=True)]).T
        for layer, addresses in self.addresses.items():
            self._kernel(parts.contiguous(), self._prompts.keys[layer], self._prompts.values[layer], addresses)
        self._known |= dict(stale)

    def _make_room(self) -> None:
        """Allocate tensors for each layer: keys [slots, kv_heads, length, head_dim in whole pairs] and values [slots, kv_heads,
        length, head_dim] int16, in tiles of LENGTH_STEP keys and pairs of values; scales [slots, kv_heads, length] float32."""
        prompts = self._prompts
        self._moves, self._known = prompts.moves, {}
        self._tensors.clear()  # before other memory is taken
        places, width = (prompts.slots, prompts.kv_heads, prompts.length), -(-prompts.head_dim // 2) * 2
        for layer in prompts.keys:
            numbers = [torch.empty(*places, each, dtype=torch.int16) for each in (width, prompts.head_dim)]
            made = *numbers, *(torch.empty(places) for _ in range(2))
            self._tensors += made
            self.addresses[layer] = dict(zip(ADDRESSES, (each.data_ptr() for each in made), strict=True))
