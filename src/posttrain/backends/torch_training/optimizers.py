"""AdamW, with learning rate and weight decay set before each update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from posttrain.config.policy import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW, with decoupled weight decay (arXiv:1711.05101) on every parameter. Rates are set before each update."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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
