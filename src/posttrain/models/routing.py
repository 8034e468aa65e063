"""Routers of a mixture of experts: recorded while sampling, replayed in training, and counted for a balance loss.

A forward hook on each router does all of it, so that the model's own code computes everything else. transformers' routers return
logits, weights and numbers of the chosen experts for every token; a router that does not is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError, Problem

_KNOWN: WeakKeyDictionary[nn.Module, Routers] = WeakKeyDictionary()


def routers_of(model: nn.Module, field: str) -> Routers:
    """Return the routers of a model, the same object for every caller: sampler and trainer may share the model.

    Args: field, the setting that needs them, for messages.
    Raises: ModelError for a model without routers, or with routers of another form.
    """
    if model not in _KNOWN:
        _KNOWN[model] = Routers(model, field)
    return _KNOWN[model]


class Routers:
    """The routers of one model, by layer. Everything is off until it is switched on, and a pass then costs three checks a layer.

    Raises: ModelError, as ``routers_of``.
    """

    def __init__(self, model: nn.Module, field: str):
        found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
        if not found:
            what = f"{field} is about the routers of a mixture of experts, and {type(model).__name__} has none"
            raise ModelError(Problem(what, fix=f"leave {field} out, or use a model with experts", field=field))
        self._normalized = [_normalizes(module, name, field) for name, module in found]
        self.layers = len(found)
        self.chosen = int(found[0][1].top_k)
        self._recorded: dict[int, Tensor] | None = None
        self._replayed: Tensor | None = None
        self._counted: Tensor | None = None
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, (_, module) in enumerate(found):
            module.register_forward_hook(self._hook(layer))

    @contextmanager
    def recording(self) -> Iterator[Mapping[int, Tensor]]:
        """Record the experts that are chosen inside the ``with`` block. Yields: layer -> [tokens, chosen], of all its passes one
        after the other; ``stacked`` makes them one tensor."""
        recorded: dict[int, Tensor] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def stacked(self, recorded: Mapping[int, Tensor]) -> Tensor:
        """Return what was recorded as [tokens, layers, chosen] int16."""
        return torch.stack([recorded[layer] for layer in range(self.layers)], dim=1).to(torch.int16)

    def prepare(self, replayed: Tensor | None, counted: Tensor | None = None) -> None:
        """Set what the following passes do, up to ``clear``; a backward pass that computes layers again needs it, too.

        Args: replayed [tokens, layers, chosen], experts to use, -1 where the router chooses itself; counted [tokens] bool, the
            tokens that ``balance`` and ``counts`` look at.
        """
        self._replayed, self._counted, self._sums = replayed, counted, {}

    def clear(self) -> None:
        self.prepare(None)

    def counts(self) -> Tensor:
        """Return the tokens sent to each expert in the last pass, [layers, experts] float64; a token counts once per expert that
        it was sent to."""
        return torch.stack([self._sums[layer][1] for layer in range(self.layers)]).double()

    def balance(self, shares: Tensor, tokens: float) -> Tensor:
        """This pass's part of the balance loss, a scalar that carries gradient: experts x the sum over experts of f P, mean over
        layers. It is 1 where experts are used evenly.

        f, the share of the assignments that an expert gets, and P, its mean probability, are over all tokens of the mini-batch:
        f is given, and P is a sum over tokens, so the parts of all micro-batches and devices add up to the same loss.

        Args: shares f, [layers, experts]; tokens of the whole mini-batch.
        Source: arXiv:2101.03961, equations 4 to 6, for several experts per token (divided by their number, as in Megatron-LM).
        """
        sums = torch.stack([self._sums[layer][0] for layer in range(self.layers)])
        return (shares.to(sums) * sums).sum() * (sums.shape[1] / (self.layers * max(tokens, 1.0)))

    def _hook(self, layer: int) -> Any:
        def routed(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._recorded is not None:
                before = self._recorded.get(layer)
                self._recorded[layer] = output[2] if before is None else torch.cat([before, output[2]])
            if self._replayed is None and self._counted is None:
                return None
            logits, weights, chosen = output
            probabilities = logits.float().softmax(dim=-1)
            if self._replayed is not None:
                given = self._replayed[:, layer].to(chosen)
                chosen = torch.where(given >= 0, given, chosen)
                weights = _weights(probabilities, chosen, normalized=self._normalized[layer]).to(weights.dtype)
            if self._counted is not None:
                counts = torch.bincount(chosen[self._counted].flatten(), minlength=logits.shape[-1])
                self._sums[layer] = probabilities[self._counted].sum(dim=0), counts
            return logits, weights, chosen

        return routed


def _weights(probabilities: Tensor, chosen: Tensor, *, normalized: bool) -> Tensor:
    taken = probabilities.gather(-1, chosen)
    return taken / taken.sum(dim=-1, keepdim=True) if normalized else taken


@torch.no_grad()
def _normalizes(router: Any, name: str, field: str) -> bool:
    """Try a router out: return True when the weights of a token's experts are made to sum to 1."""
    weight = getattr(router, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(16, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        output = router(hidden)
        if isinstance(output, tuple) and len(output) == 3 and output[2].dtype == torch.int64:
            probabilities = output[0].float().softmax(dim=-1)
            for normalized in (True, False):
                ours = _weights(probabilities, output[2], normalized=normalized)
                if torch.allclose(ours, output[1].float(), atol=1e-2):
                    return normalized
    what = f"{field}: {type(router).__name__} ({name}) does not weigh experts by the softmax of its logits"
    raise ModelError(Problem(what, fix=f"leave {field} out", field=field))
