"""AdamW in one pass over masters, gradients, averages and the rounded weights, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from posttrain.libraries.cpu_kernels.load import kernels_for
from posttrain.libraries.cpu_kernels.update import UpdateKernels


@torch.no_grad()
def one_pass(optimizer: torch.optim.Optimizer, copies: Mapping[nn.Parameter, Tensor], clip: float) -> bool:
    """Make an update of AdamW and round the weights into their copies, with gradients times ``clip``. The optimizer's state is
    torch's own. Returns: False, with nothing done, where another optimizer, device or dtype needs torch's own passes.

    Args: copies, of the parameters that have one.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return False
    groups = optimizer.param_groups
    if any(group["amsgrad"] or group["maximize"] for group in groups):
        return False
    found = [(group, each, _kernels(each, copies.get(each))) for group in groups for each in group["params"]]
    if not all(kernels for _, _, kernels in found):
        return False
    for group, parameter, kernels in found:
        grad = parameter.grad
        if grad is None:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        cast(UpdateKernels, kernels).adamw(
            parameter,
            grad.contiguous(),
            (state["exp_avg"], state["exp_avg_sq"]),
            copies.get(parameter),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            steps=int(state["step"]),
            clip=clip,
        )
    return True


def _kernels(parameter: nn.Parameter, copy: Tensor | None) -> UpdateKernels | None:
    """Return the kernels for a float32 parameter and the dtype of its copy; None where there are none."""
    tensors = [each for each in (parameter, parameter.grad, copy) if each is not None]
    if parameter.dtype != torch.float32 or not all(each.is_contiguous() for each in tensors):
        return None
    if any(each.dtype != torch.float32 for each in tensors[: 1 + (parameter.grad is not None)]):
        return None
    return kernels_for(parameter) and kernels_for(parameter if copy is None else copy)
