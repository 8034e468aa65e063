"""The optimal token baseline for responses with tool output inside: position counts sampled tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.advantages.optimal_token_baseline import optimal_token_baseline
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
) -> Tensor:
    """optimal_token_baseline, with each response pressed together to its sampled tokens first and spread out again after.

    Args and returns: as optimal_token_baseline's.
    Source: verl 0.9's tir_optimal_token_baseline ("tool-integrated reasoning").
    """
    # Sampled tokens to the front, in their order.
    order = (~response_mask).long().argsort(dim=1, stable=True)
    pressed = optimal_token_baseline(
        token_rewards.gather(1, order),
        valid,
        group_index,
        response_mask.gather(1, order),
        old_logprobs.gather(1, order),
        sum_pi_squared.gather(1, order),
    )
    return torch.zeros_like(pressed).scatter(1, order, pressed)
