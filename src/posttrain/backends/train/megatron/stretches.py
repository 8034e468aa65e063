"""Sharded optimizer states: of the ranks that hold the same weight, each updates a slice of it and broadcasts the result.

As in ZeRO's stage 1 (arXiv:1910.02054), and Megatron's distributed optimizer. An update is elementwise, so the slicing does not
change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


class Stretches:
    """This rank's slice of every weight, a view of the weight's memory: the parameters of its optimizer.

    Args: weights by name, contiguous; group_of a name: the ranks that hold the same weight.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], group_of: Callable[[str], dist.ProcessGroup]):
        self._weights, self._group_of = weights, group_of
        self.mine = {name: nn.Parameter(self.cut(name, weight.detach())) for name, weight in weights.items()}

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice, [n], possibly empty, of a tensor as large as a weight."""
        return whole.view(-1)[self.place(name)]

    def place(self, name: str) -> slice:
        """Return the place of this rank's slice in the values of a weight."""
        size, length = self._weights[name].numel(), self._length(name)
        first = min(self._group_of(name).rank() * length, size)
        return slice(first, min(first + length, size))

    def take_gradients(self) -> None:
        """Copy the weights' gradients to the slices."""
        for name, part in self.mine.items():
            gradient = self._weights[name].grad
            assert gradient is not None, "every weight has a gradient before an update"
            part.grad = self.cut(name, gradient)

    def tell(self) -> None:
        """Broadcast the updated slices of every rank, in one message per group."""
        for group in dict.fromkeys(map(self._group_of, self.mine)):
            names = [name for name in self.mine if self._group_of(name) is group]
            for name, whole in self._gathered({name: self.mine[name].detach() for name in names}, group):
                self._weights[name].detach().copy_(whole)
        for part in self.mine.values():
            part.grad = None

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors as large as the weights from every rank's slices, [n] by name."""
        return {
            name: whole for name, part in parts.items() for _, whole in self._gathered({name: part}, self._group_of(name))
        }  # fmt: skip

    @torch.no_grad()
    def _gathered(self, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[tuple[str, Tensor]]:
        lengths = [self._length(name) for name in parts]
        filled = [pad(part, (0, length - len(part))) for part, length in zip(parts.values(), lengths, strict=True)]
        flat = torch.cat(filled)
        everyone = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(everyone, flat, group=group)
        found = []
        for name, pieces in zip(parts, zip(*(each.split(lengths) for each in everyone), strict=True), strict=True):
            weight = self._weights[name]
            found.append((name, torch.cat(pieces)[: weight.numel()].view(weight.shape)))
        return found

    def _length(self, name: str) -> int:
        return -(-self._weights[name].numel() // self._group_of(name).size())
