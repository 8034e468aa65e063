"""Offloading of weights from their device while other models of the same process use it.

The tensor objects stay, and every reference to them remains valid: their memory is freed, and filled again before they are
needed. With sharded weights, each process offloads its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Resting:
    """Args: ``tensors`` returns them, called before every offload. None of them may be in use then: no backward pass and no
    gathering may be pending."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self._tensors = tensors
        # Freed memory, with its content.
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def away(self) -> bool:
        return bool(self._kept)

    @torch.no_grad()
    def leave(self) -> None:
        """Move to the CPU. No-op when already there."""
        if self._kept:
            return
        seen = set()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            # An empty shard, or a tensor shared by two names.
            if storage.data_ptr() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            here = _bytes_of(storage)
            kept = torch.empty(here.shape, dtype=torch.uint8, pin_memory=here.is_cuda)
            self._kept.append((storage, kept.copy_(here)))
        for storage, _ in self._kept:
            storage.resize_(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """Move back to the device. No-op when already there."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept)
        self._kept = []


class Turns:
    """Alternate use of a device by models, by role. Models of other roles stay in place."""

    def __init__(self, resting: Mapping[str, Resting], lenders: Mapping[str, str] | None = None):
        """Args: lenders are the roles whose weights others read (role -> lender)."""
        self._resting = dict(resting)
        self._lenders = dict(lenders or {})

    def take(self, *roles: str) -> None:
        """Bring these roles' models to the device, after offloading the others to make room."""
        wanted = {self._lenders.get(role, role) for role in roles}
        for role, resting in self._resting.items():
            if role not in wanted:
                resting.leave()
        for role in wanted & self._resting.keys():
            self._resting[role].come_back()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View the storage itself as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
