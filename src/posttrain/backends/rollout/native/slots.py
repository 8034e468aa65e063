"""Keys and values of the sequences being decoded: one slot each, preallocated, active slots first."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """Preallocated keys and values, [slots, kv_heads, max_len, head_dim] per layer.

    Stands in for a transformers cache: attention layers call ``update``. Which slots a forward pass writes, and where, is
    set beforehand by ``prefilling`` or ``decoding``.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (slots, kv_heads, max_len, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._prefill: list[tuple[int, int, list[int]]] | None = None
        self._rows: Tensor | None = None
        self._positions: Tensor | None = None
        self._visible_len = 0

    def prefilling(self, parts: list[tuple[int, int, list[int]]]) -> None:
        """The next pass holds packed prompts: tokens start to end of its row go to each of the slots listed."""
        self._prefill = parts

    def decoding(self, positions: Tensor, visible_len: int) -> None:
        """The next pass holds one token for each of the first len(positions) slots, at these positions."""
        self._prefill = None
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._visible_len = visible_len

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store what a layer computed; return what its queries may see.

        Prefill: key, value [1, kv_heads, N, head_dim], returned as they are (a prompt sees only itself).
        Decode: key, value [A, kv_heads, 1, head_dim] -> views [A, kv_heads, visible_len, head_dim] of the first A slots.
        """
        keys, values = self.keys[layer], self.values[layer]
        if self._prefill is not None:
            for start, end, slots in self._prefill:
                keys[slots, :, : end - start] = key[0, :, start:end]
                values[slots, :, : end - start] = value[0, :, start:end]
            return key, value
        assert self._rows is not None and self._positions is not None
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        active = len(self._rows)
        return keys[:active, :, : self._visible_len], values[:active, :, : self._visible_len]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot over another."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]
