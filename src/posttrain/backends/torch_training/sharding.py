"""How a model and a mini-batch are shared out over the processes of an engine. Here: one process has it all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

T = TypeVar("T")


class Sharding:
    """One process. Engines over several processes inject a subclass; all of them make the same calls with the same batches,
    and get the same results."""

    rank = 0
    ranks = 1
    splits_when_out_of_memory = True  # with others in lockstep, one process cannot go another way alone

    def wrap(self, model: PreTrainedModel) -> None:
        """Share the parameters out, in place."""

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        """``scores()``, which runs the model, in a place where its parameters can be read."""
        return scores()

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this process, as many as every other one has; an empty one is run and counts nothing."""
        return parts

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        """[rows of this process, T] to [count, T], with everyone's rows in their places."""
        out = values.new_zeros(count, *values.shape[1:])
        out[torch.tensor(list(rows), dtype=torch.int64)] = values
        return out

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over all processes."""
        return dict(sums)

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, on the CPU, from the part that is here."""
        return tensor.detach().cpu().contiguous()

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The part of a whole tensor that belongs here, placed as ``like`` is."""
        return tensor.to(like.device)

    def wait(self) -> None:
        """Until everyone has come so far."""
