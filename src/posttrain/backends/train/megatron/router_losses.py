"""Losses of routers that lie on any stage of a pipeline, while the loss of the tokens is known on the last one.

Each router's part is attached to the weights of its experts: it changes nothing forward, and adds its gradient backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Total(NamedTuple):
    """The weighted sum of the losses, and the mean of each over layers."""

    weighted: float
    means: dict[str, float]


class RouterLosses:
    """The losses of one mini-batch; all micro-batches and ranks together make them.

    A layer's balance is experts x the sum over experts of f P, 1 where experts are used evenly: f is the share of the assignments
    that an expert gets, and P its mean probability, over the counted tokens of the mini-batch. Small logits: the squared
    logsumexp of a token's logits, mean over these tokens.

    Args: balance and small_logits, the weights of a layer's losses; counts [layers, experts], the tokens that each expert gets;
        chosen, the experts of a token.
    Source: arXiv:2101.03961, equations 4 to 6, for several experts per token (divided by their number, as in Megatron-LM);
        arXiv:2202.08906, equation 5.
    """

    def __init__(self, *, balance: float, small_logits: float, counts: Tensor, chosen: int):
        self._balance, self._small_logits = balance, small_logits
        self._shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        self._tokens = (counts.sum(dim=1) / chosen).clamp(min=1)
        # This rank's parts of both
        self.sums = torch.zeros(2, len(counts), dtype=torch.float64, device=counts.device)

    def attached(self, layer: int, logits: Tensor, weights: Tensor) -> Tensor:
        """Attach this pass's part of a layer's losses to the weights of its experts. Args: logits of counted tokens."""
        wide, experts, tokens = logits.float(), logits.shape[-1], self._tokens[layer]
        balance = (self._shares[layer].float() * wide.softmax(dim=-1).sum(dim=0)).sum() * experts / tokens
        small = wide.logsumexp(dim=-1).square().sum() / tokens
        self.sums[:, layer] += torch.stack([balance, small]).detach()
        loss = self._balance * balance + self._small_logits * small
        attached: Tensor = _WithLoss.apply(weights, loss.float())
        return attached

    def total(self, sums: Tensor) -> Total:
        """Return the losses of all layers. Args: sums [2, layers], of all ranks."""
        weights = {"router_balance": self._balance, "router_small_logits": self._small_logits}
        by_name = dict(zip(weights, sums, strict=True))
        return Total(
            weighted=sum(weights[name] * float(layers.sum()) for name, layers in by_name.items()),
            means={name: float(layers.mean()) for name, layers in by_name.items() if weights[name]},
        )


class _WithLoss(torch.autograd.Function):
    """Values, with a loss whose gradient is added where theirs comes from."""

    @staticmethod
    def forward(context: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), device=gradient.device)
