"""Optimizers by their name in the configuration, with learning rate and weight decay set before each update."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from posttrain.backends.torch_training.muon import Muon
from posttrain.config.policy import OptimizerConfig


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, matrices: Container[str] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of a configuration over parameters by name. Rates are set before each update.

    adamw: decoupled weight decay (arXiv:1711.05101) on every parameter. sgd: momentum as in torch.optim.SGD, whose weight decay
    is added to the gradient. muon: orthogonalised momentum for the ``matrices``, AdamW for the rest.
    """
    lr, decay = config.lr, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters.values(), lr=lr, momentum=config.momentum or 0.0, weight_decay=decay)
    if config.name == "muon":
        momentum = 0.95 if config.momentum is None else config.momentum
        hidden = [weight for name, weight in parameters.items() if name in matrices]
        others = [weight for name, weight in parameters.items() if name not in matrices]
        return Muon(hidden, others, lr=lr, weight_decay=decay, momentum=momentum, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(
        parameters.values(), lr=lr, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True
    )


def averages_of(config: OptimizerConfig) -> tuple[str, ...]:
    """Return the names of what adamw and sgd keep for each weight, in the shape of the weight."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def set_rates(optimizer: torch.optim.Optimizer, *, learning_rate: float, weight_decay: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay


def move_state(optimizer: torch.optim.Optimizer, place: Callable[[Tensor], torch.device]) -> None:
    """Move the running averages of every parameter to ``place(parameter)``; the step counters are not moved."""
    for parameter, state in optimizer.state.items():
        device = place(parameter)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value.to(device, non_blocking=True)
