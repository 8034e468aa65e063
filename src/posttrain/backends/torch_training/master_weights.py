"""float32 master weights behind a model that computes in bfloat16.

The forward and backward passes (and the sampler, which shares the model) use the bfloat16 weights; gradients are accumulated
in float32 and the optimizer updates float32 masters, so small updates are not rounded away. With a float32 model, or with
bfloat16 masters, the masters are the weights themselves and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from posttrain.backends.torch_training.one_pass_adamw import one_pass
from posttrain.backends.torch_training.optimizers import build_optimizer, move_state
from posttrain.config.policy import OptimizerConfig
from posttrain.libraries.cpu_kernels.load import kernels_for
from posttrain.models.chunks import shapes_of
from posttrain.models.matrices import hidden_matrices


class Shards(Protocol):
    """The parts of tensors that each process has (torch_training.sharding.Sharding)."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor, on the CPU, from the part that is here."""
        ...

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return the part of a whole tensor that belongs here, placed as ``like`` is."""
        ...

    def read(self, saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        """Return the part of a saved tensor that belongs here; other parts need not be read."""
        ...


class MasterWeights:
    """The trained parameters of a model in the dtype that is trained, by name, synchronized with the model: gradients in, updates
    out, whole values in both directions. An engine whose library does this itself has its own class (Sharding.masters).

    float32 masters of bfloat16 weights cost, per weight: 4 bytes for the master and 4 for its gradient, besides the 2 of
    the weight. They get their values when these are first needed.
    """

    _unset = False  # True until masters have values
    _stored: Mapping[str, Tensor] = MappingProxyType({})  # those that they begin with, where they are not the weights'

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32):
        # (weight, master) where they differ.
        self._shadowed: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._matrices = hidden_matrices(model)
        self._trained: dict[str, nn.Parameter] = {}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.dtype in (dtype, torch.float32):
                self._trained[name] = weight
                continue
            master = nn.Parameter(torch.empty_like(weight.detach(), dtype=dtype))
            self._trained[name] = master
            self._shadowed.append((weight, master))
            weight.register_post_accumulate_grad_hook(_adder(master))
        self._unset = bool(self._shadowed)

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters for their names and shapes: masters may have no values yet."""
        return self._trained

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters, by name."""
        self._set()
        return self._trained

    @property
    def shadow(self) -> bool:
        """Return True when a weight of the model is a rounded copy of its master."""
        return bool(self._shadowed)

    def start_from(self, stored: Mapping[str, Tensor]) -> None:
        """Take the masters' values, by name, as they were before they were rounded into the model, which stays unchanged."""
        self._stored = stored
        self._unset = bool(self._shadowed)

    @torch.no_grad()
    def _set(self) -> None:
        """Give the masters their first values, when something needs them: sampling does not, and begins sooner without."""
        if not self._unset:
            return
        self._unset, stored, self._stored = False, self._stored, {}
        names = {id(master): name for name, master in self._trained.items()}
        for weight, master in self._shadowed:
            master.copy_(stored[names[id(master)]] if stored else weight)

    @property
    def hold_gradients(self) -> bool:
        return any(master.grad is not None for master in self._trained.values())

    def optimizer(self, settings: OptimizerConfig) -> torch.optim.Optimizer:
        """Return the optimizer over the masters; called once."""
        return build_optimizer(dict(self._trained), settings, self._matrices)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to the accumulated gradients."""
        loss.backward()

    @torch.no_grad()
    def divide_gradients(self, divisor: float) -> None:
        """Divide the accumulated gradients; a factor of the loss is taken back by it."""
        for master in self.parameters.values():
            if master.grad is not None:
                master.grad.mul_(1 / divisor)

    def step(
        self, optimizer: torch.optim.Optimizer, limit: float | None, sharding: Shards, *, offload: bool = False
    ) -> float:
        """Clip to ``limit``, update and publish, unless a gradient is not finite. Returns: the norm before clipping.

        Args: with offload, the optimizer's averages are kept on the CPU between updates.
        """
        parameters = self.parameters.values()
        total = get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = float(sharding.whole(total))
        if not math.isfinite(norm):
            return norm
        clips = limit is not None and norm > limit
        copies = {master: weight.detach() for weight, master in self._shadowed}
        # As clip_grads_with_norm_ has it
        if one_pass(optimizer, copies, cast(float, limit) / (norm + 1e-6) if clips else 1.0):
            return norm
        # clip_grad_norm_ would multiply by 1 otherwise: a pass over all gradients
        if limit is not None and clips:
            clip_grads_with_norm_(parameters, limit, total)
        if offload:
            move_state(optimizer, lambda parameter: parameter.device)
        optimizer.step()
        if offload:
            move_state(optimizer, lambda parameter: torch.device("cpu"))
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        self._set()
        for weight, master in self._shadowed:
            weight.copy_(master)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], sharding: Shards) -> None:
        """Set the masters to these values, whole and by name, and publish them."""
        self._unset, self._stored = False, {}
        for name, master in self._trained.items():
            master.copy_(sharding.read(tensors, name, like=master))
        self.publish()

    def whole(self, sharding: Shards) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values, whole and float32, on the CPU. A collective call of all processes."""
        for name, master in self.parameters.items():
            yield name, sharding.whole(master).float()

    def averages(self, optimizer: torch.optim.Optimizer, sharding: Shards) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's averages and step counters, whole, with "kind:name of the weight"; none for a weight without any
        gradient so far. A collective call of all processes."""
        for name, value in self.states(optimizer).items():
            yield name, sharding.whole(value)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the averages and step counters in their local, sharded form, on any device."""
        return {
            f"{kind}:{name}": value
            for name, master in self._trained.items()
            for kind, value in optimizer.state.get(master, {}).items()
            if isinstance(value, Tensor)
        }

    def load_averages(
        self,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Tensor],
        sharding: Shards,
        *,
        offload: bool = False,
    ) -> None:
        """Load the output of ``averages``; with an empty one the averages start from zero."""
        optimizer.state.clear()
        for kind_and_name, shape in shapes_of(saved).items():
            kind, name = kind_and_name.split(":", 1)
            master = self._trained[name]
            if shape:
                optimizer.state[master][kind] = sharding.read(saved, kind_and_name, like=master)
            else:
                optimizer.state[master][kind] = saved[kind_and_name].to(master.device)
        if offload:
            move_state(optimizer, lambda parameter: torch.device("cpu"))

    def zero_grad(self) -> None:
        """Drop the gradients, also those that an interrupted backward pass has left in the weights themselves."""
        for master in self._trained.values():
            master.grad = None
        for weight, _ in self._shadowed:
            weight.grad = None


def _adder(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            _add(weight.grad, master.grad)
        weight.grad = None

    return add_gradient


def _add(grad: Tensor, total: Tensor) -> None:
    """total += grad; in one pass where the dtypes differ and there is a kernel."""
    kernels = kernels_for(grad) if total.dtype == torch.float32 != grad.dtype else None
    if kernels is not None and grad.is_contiguous() and total.is_contiguous():
        kernels.add(grad, total)
    else:
        total.add_(grad)
