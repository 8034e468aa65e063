"""The choice of experts by megatron-core's routers: recorded while log-probs are computed, replayed in later passes.

A router of megatron-core asks its ``router_replay`` for the experts of every token; here that is a ``Layer`` of the choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.backends.train.megatron.experts import Router
from posttrain.plan.experts import ExpertLayers

TopK = Callable[..., tuple[Tensor, Tensor]]


class ExpertChoice:
    """The routers of this rank's stages, by their numbers among all layers with experts."""

    def __init__(self, model: nn.Module, experts: ExpertLayers):
        numbers = [layer for layer, has_experts in enumerate(experts.layers) if has_experts]
        self.layers, self.chosen = len(numbers), experts.chosen
        self._replayed: Tensor | None = None
        self._micro = 0
        self._learns = False
        self._recorded: dict[int, dict[int, Tensor]] | None = None
        self._waiting: dict[int, deque[Tensor | None]] = {}  # by layer, of micro-batches whose backward pass is to come
        for router in (module for module in model.modules() if isinstance(module, Router)):
            assert router.layer_number is not None, "megatron-core numbers its layers, from 1"
            number = numbers.index(router.layer_number - 1)
            self._waiting[number] = deque()
            router.router_replay = Layer(self, number)  # called by one method alone

    def prepare(self, micro: int, experts: Tensor | None, *, learns: bool) -> None:
        """Set what the forward pass of a micro-batch does.

        Args: micro, its number; experts [n, layers, chosen] of this rank's tokens, -1 where the router chooses itself, None:
            everywhere; learns: a backward pass follows, which may compute layers again.
        """
        self._micro, self._replayed, self._learns = micro, experts, learns

    def clear(self) -> None:
        """Let every router choose itself again."""
        self._replayed, self._learns = None, False
        for waiting in self._waiting.values():
            waiting.clear()

    @contextmanager
    def recording(self) -> Iterator[Mapping[int, Mapping[int, Tensor]]]:
        """Record the experts of the passes inside the ``with`` block. Yields: micro-batch -> layer -> [n, chosen], of this rank's
        tokens and layers."""
        recorded: dict[int, dict[int, Tensor]] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the experts to use, [n, chosen], from those that the router would use."""
        given = self._of_this_pass(layer)
        if given is not None:
            mine = given[:, layer].to(chosen)
            chosen = torch.where(mine >= 0, mine, chosen)
        if self._recorded is not None:
            self._recorded.setdefault(self._micro, {})[layer] = chosen
        return chosen

    def _of_this_pass(self, layer: int) -> Tensor | None:
        """Return what a pass replays. A layer that is computed again in the backward pass is computed without gradient before;
        micro-batches take both passes in the same order, and in a pipeline others come in between."""
        if not self._learns:
            return self._replayed
        if not torch.is_grad_enabled():
            self._waiting[layer].append(self._replayed)
            return self._replayed
        return self._waiting[layer].popleft() if self._waiting[layer] else self._replayed


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
