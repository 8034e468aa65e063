"""Muon: momentum whose matrices are orthogonalised, beside AdamW for everything that is no matrix of a hidden layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(Optimizer):
    """Matrices: m <- momentum x m + g, and w <- w - lr (0.2 sqrt(max(rows, columns)) orthogonal(g + momentum x m) + decay x w);
    the factor gives the update about the size of AdamW's, so that one learning rate serves both. Others: AdamW.

    A stack of matrices (the experts of a layer) is orthogonalised matrix by matrix. A sharded matrix is gathered for it.

    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; the factor and the decay:
    arXiv:2502.16982, section 2.2.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        groups = [{"params": list(matrices), "matrices": True}, {"params": list(others), "matrices": False}]
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "losses are computed before the step"
        for group in self.param_groups:
            update = _muon if group["matrices"] else _adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update(parameter.grad, self.state[parameter], group) * group["lr"])
        return None


def _muon(gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
    ahead = gradient + group["momentum"] * state["momentum_buffer"]
    return _whole_matrices(ahead) * (0.2 * math.sqrt(max(gradient.shape[-2:])))


def _whole_matrices(update: Tensor) -> Tensor:
    if not isinstance(update, DTensor):
        return orthogonalized(update)
    # Every process computes all of it, so nothing is sent back.
    whole = orthogonalized(update.full_tensor())
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def _adamw(gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """The step of AdamW but for rate and decay."""
    if "step" not in state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first, second = group["betas"]
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    done = float(state["step"])
    size = (state["exp_avg_sq"] / (1 - second**done)).sqrt() + group["eps"]
    return state["exp_avg"] / (1 - first**done) / size


def orthogonalized(matrices: Tensor) -> Tensor:
    """U V^T of every matrix U S V^T, about: five steps of a quintic Newton-Schulz iteration bring all singular values to 0.7 to
    1.2. In bfloat16 on accelerators, in float32 on the CPU.

    Args: [..., rows, columns]. Returns: the same shape and dtype; 0 where the matrix is 0.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)
