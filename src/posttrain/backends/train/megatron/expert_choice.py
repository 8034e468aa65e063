"""The choice of experts by megatron-core's routers: recorded while log-probs are computed, replayed in later passes.

A router of megatron-core asks its ``router_replay`` for the experts of every token; here that is a ``Layer`` of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.backends.train.megatron.experts import Router
from posttrain.backends.train.megatron.sharding import MegatronSharding

TopK = Callable[..., tuple[Tensor, Tensor]]


class ExpertChoice:
    """The routers of a model that is not cut into stages, by layer."""

    def __init__(self, model: nn.Module, sharding: MegatronSharding):
        routers = [module for module in model.modules() if isinstance(module, Router)]
        self.layers, self.chosen = len(routers), routers[0].topk
        self._sharding = sharding
        self._replayed: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        for number, router in enumerate(routers):
            router.router_replay = Layer(self, number)  # called by one method alone

    def prepare(self, experts: Tensor | None) -> None:
        """Set what the following passes do, up to the next call; a backward pass that computes layers again needs it, too.

        Args: experts [n, layers, chosen] of this rank's tokens, -1 where the router chooses itself; None: everywhere.
        """
        self._replayed = experts
        if self._recorded is not None:
            self._recorded.clear()

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record the experts of every pass inside the ``with`` block.

        Yields: a function that returns those of the pass since ``prepare``, of all tokens of the row and its padding, [n, layers,
            chosen] on the CPU. All tensor-parallel ranks call it.
        """
        recorded: dict[int, Tensor] = {}
        self._recorded = recorded
        try:
            yield lambda: self._sharding.of_all_tokens(torch.stack([recorded[n] for n in range(self.layers)], dim=1))
        finally:
            self._recorded = None

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the experts to use, [n, chosen], from those that the router would use."""
        if self._replayed is not None:
            given = self._replayed[:, layer].to(chosen)
            chosen = torch.where(given >= 0, given, chosen)
        if self._recorded is not None:
            self._recorded[layer] = chosen
        return chosen


class Layer:
    """megatron.core.transformer.moe.router_replay.RouterReplay (0.16), as routers call it."""

    def __init__(self, choice: ExpertChoice, number: int):
        self._choice, self._number = choice, number

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts and their numbers, both [n, topk]."""
        _, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self._choice.choose(self._number, chosen)
        return scores.gather(1, chosen), chosen
