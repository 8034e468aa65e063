"""Weights that leave their device while other models of the same process work on it.

The tensors stay the objects they are, with every reference to them good: their memory is given back, and filled again before
they are needed. Where weights are shared out, each process moves its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Resting:
    """Args: ``tensors`` gives them, asked for every time they leave. None of them may be in use then: no gradient is waited for,
    and nothing is gathered."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self._tensors = tensors
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []  # memory that was given back, and what was in it

    @property
    def away(self) -> bool:
        return bool(self._kept)

    @torch.no_grad()
    def leave(self) -> None:
        """To the CPU. Does nothing when they are there."""
        if self._kept:
            return
        seen = set()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.data_ptr() == 0 or storage.data_ptr() in seen:  # an empty part; or a tensor that two names share
                continue
            seen.add(storage.data_ptr())
            here = _bytes_of(storage)
            kept = torch.empty(here.shape, dtype=torch.uint8, pin_memory=here.is_cuda)
            self._kept.append((storage, kept.copy_(here)))
        for storage, _ in self._kept:
            storage.resize_(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """To their device. Does nothing when they are there."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept)
        self._kept = []


class Turns:
    """Models that take turns on a device, by role. One that is not among them stays where it is."""

    def __init__(self, resting: Mapping[str, Resting], lenders: Mapping[str, str] | None = None):
        """Args: lenders are the roles whose weights others read (role -> lender)."""
        self._resting = dict(resting)
        self._lenders = dict(lenders or {})

    def take(self, *roles: str) -> None:
        """It is these roles' turn: the others leave first, so that there is room."""
        wanted = {self._lenders.get(role, role) for role in roles}
        for role, resting in self._resting.items():
            if role not in wanted:
                resting.leave()
        for role in wanted & self._resting.keys():
            self._resting[role].come_back()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8, over the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
