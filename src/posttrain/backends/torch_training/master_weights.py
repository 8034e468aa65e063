"""float32 master weights behind a model that computes in bfloat16.

The forward and backward passes (and the sampler, which shares the model) use the bfloat16 weights; gradients are added up
in float32 and the optimizer works on float32 masters, so small updates are not rounded away. With a float32 model the
masters are the weights themselves and nothing is copied; so they are where bfloat16 masters are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from posttrain.backends.torch_training.sharding import Sharding


class MasterWeights:
    """The trained parameters of a model in the dtype that is trained, by name, kept in step with it.

    float32 masters of bfloat16 weights cost, per weight: 4 bytes for the master and 4 for its gradient, besides the 2 of
    the weight.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32):
        self._shadowed: list[tuple[nn.Parameter, nn.Parameter]] = []  # (weight, master) where they differ
        self.parameters: dict[str, nn.Parameter] = {}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.dtype in (dtype, torch.float32):
                self.parameters[name] = weight
                continue
            master = nn.Parameter(weight.detach().to(dtype))
            self.parameters[name] = master
            self._shadowed.append((weight, master))
            weight.register_post_accumulate_grad_hook(_adder(master))

    @property
    def hold_gradients(self) -> bool:
        return any(master.grad is not None for master in self.parameters.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for weight, master in self._shadowed:
            weight.copy_(master)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], sharding: Sharding) -> None:
        """Take these values, whole and by name, and publish them."""
        for name, master in self.parameters.items():
            master.copy_(sharding.part(tensors[name].to(master.dtype), like=master))
        self.publish()

    def zero_grad(self) -> None:
        """Also what a backward pass that broke off has left in the weights themselves."""
        for master in self.parameters.values():
            master.grad = None
        for weight, _ in self._shadowed:
            weight.grad = None


def _adder(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return add_gradient
