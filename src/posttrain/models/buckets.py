"""Sequences of a packed row that attention processes together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Shared prompts of a bucket's groups, left-padded to ``length``."""

    tokens: Tensor  # [m] int64, positions of the prompts' tokens in the packed row
    places: Tensor  # [m] int64, their positions in [groups * length]
    visible: Tensor  # [groups, length] bool, False in the padding
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """``rows`` sequences, right-padded to ``length``; with a prefix, rows / groups of them share each prompt."""

    tokens: Tensor  # [n] int64, positions of the sequences' tokens in the packed row
    places: Tensor  # [n] int64, their positions in [rows * length]
    rows: int
    length: int
    prefix: Prefix | None = None

    @property
    def keys(self) -> int:
        """Largest number of keys that a query sees."""
        return self.length + (self.prefix.length if self.prefix else 0)
