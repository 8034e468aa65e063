"""float32 master weights behind a model that computes in bfloat16.

The forward and backward passes (and the sampler, which shares the model) use the bfloat16 weights; gradients are added up
in float32 and the optimizer works on float32 masters, so small updates are not rounded away. With a float32 model the
masters are the weights themselves and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """float32 parameters of a model, by name, kept in step with it.

    Costs, per weight: 4 bytes for the master and 4 for its gradient, besides the 2 of the bfloat16 weight.
    """

    def __init__(self, model: nn.Module):
        self._shadowed: list[tuple[nn.Parameter, nn.Parameter]] = []  # (weight, master) where they differ
        self.parameters: dict[str, nn.Parameter] = {}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.dtype == torch.float32:
                self.parameters[name] = weight
                continue
            master = nn.Parameter(weight.detach().float())
            self.parameters[name] = master
            self._shadowed.append((weight, master))
            weight.register_post_accumulate_grad_hook(_adder(master))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for weight, master in self._shadowed:
            weight.copy_(master)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these values, by name, and publish them."""
        for name, master in self.parameters.items():
            master.copy_(tensors[name])
        self.publish()

    def zero_grad(self) -> None:
        for master in self.parameters.values():
            master.grad = None


def _adder(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return add_gradient
