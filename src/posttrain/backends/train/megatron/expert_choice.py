"""The choice of experts by megatron-core's routers: recorded while log-probs are computed, replayed in later passes, and
counted for the losses of routers.

A router of megatron-core asks its ``router_replay`` for the experts of every token; here that is a ``Layer`` of the choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.backends.train.megatron.experts import Router
from posttrain.backends.train.megatron.router_losses import RouterLosses
from posttrain.plan.experts import ExpertLayers

TopK = Callable[..., tuple[Tensor, Tensor]]


class Passing(NamedTuple):
    """Tokens of this rank in a pass. Experts [n, layers, chosen], -1 where the router chooses itself, None: everywhere; counted
    [n] bool, at which losses look, None: at none."""

    experts: Tensor | None = None
    counted: Tensor | None = None


class ExpertChoice:
    """The routers of this rank's stages, by their numbers among all layers with experts."""

    def __init__(self, model: nn.Module, experts: ExpertLayers):
        numbers = [layer for layer, has_experts in enumerate(experts.layers) if has_experts]
        self.layers, self.chosen, self.experts = len(numbers), experts.chosen, experts.experts
        self.losses: RouterLosses | None = None  # of the passes with a backward pass
        self._passing = Passing()
        self._now = Passing()  # that of the layer that is computed
        self._micro = 0
        self._learns = False
        self._recorded: dict[int, dict[int, Tensor]] | None = None
        self._counts: Tensor | None = None
        self._waiting: dict[int, deque[Passing]] = {}  # by layer, of micro-batches whose backward pass is to come
        for router in (module for module in model.modules() if isinstance(module, Router)):
            assert router.layer_number is not None, "megatron-core numbers its layers, from 1"
            number = numbers.index(router.layer_number - 1)
            self._waiting[number] = deque()
            router.router_replay = Layer(self, number)  # called by one method alone
            router.watch = partial(self._watch, number)

    def prepare(self, micro: int, passing: Passing, *, learns: bool) -> None:
        """Set what the forward pass of a micro-batch does. Args: micro, its number; learns: a backward pass follows, which may
        compute layers again."""
        self._micro, self._passing, self._learns = micro, passing, learns

    def clear(self) -> None:
        """Let every router choose itself again."""
        self._passing, self._learns = Passing(), False
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

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[Tensor]:
        """Count the counted tokens of the passes inside the ``with`` block. Yields: [layers, experts] float64, the tokens that
        this rank's routers send to each expert."""
        self._counts = torch.zeros(self.layers, self.experts, dtype=torch.float64, device=device)
        try:
            yield self._counts
        finally:
            self._counts = None

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the experts to use, [n, chosen], from those that the router would use."""
        self._now = self._of_this_pass(layer)
        if self._now.experts is not None:
            mine = self._now.experts[:, layer].to(chosen)
            chosen = torch.where(mine >= 0, mine, chosen)
        if self._recorded is not None:
            self._recorded.setdefault(self._micro, {})[layer] = chosen
        return chosen

    def _watch(self, layer: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Count a layer's choice, and attach its losses to the weights; all [n, experts]."""
        counted = self._now.counted
        if counted is not None and self._counts is not None:
            self._counts[layer] += chosen[counted].sum(dim=0)
        # A layer that is computed again has its losses in the second pass
        if counted is None or self.losses is None or not self._learns or not torch.is_grad_enabled():
            return weights
        return self.losses.attached(layer, logits[counted], weights)

    def _of_this_pass(self, layer: int) -> Passing:
        """Return what a pass does. A layer that is computed again in the backward pass is computed without gradient before;
        micro-batches take both passes in the same order, and in a pipeline others come in between."""
        if not self._learns:
            return self._passing
        if not torch.is_grad_enabled():
            self._waiting[layer].append(self._passing)
            return self._passing
        return self._waiting[layer].popleft() if self._waiting[layer] else self._passing


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
