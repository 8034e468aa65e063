"""Functions of the rows of a batch, computed where the values of these rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class RowWork(Protocol):
    """Compute a function of rows of tensors."""

    def __call__(self, of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return ``of(*tensors)``, [B, ...].

        Args: of, a function of this package that computes each row by itself, so that several processes can share the rows;
            tensors [B, T].
        """
        ...


def in_this_process(of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """See RowWork."""
    return of(*tensors)


class RowReader(Protocol):
    """Read rows of tensors: those that lie elsewhere, where they are, so that their values alone come to this process."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, [B, T] each, in the memory of this process."""
        ...


def as_they_are(tensors: Sequence[Tensor]) -> list[Tensor]:
    """See RowReader: each is read by its first use."""
    return list(tensors)
