"""ReMax: the baseline of a response is the reward of the greedy response to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.returns import returns_to_go
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("remax")
def remax(token_rewards: Tensor, valid: Tensor, response_mask: Tensor, greedy_rewards: Tensor) -> Tensor:
    """A = undiscounted return from the token on - reward of the prompt's greedy response.

    Args: token_rewards [B, T]; valid [B] bool (invalid responses get 0; so do those whose greedy reward is not finite);
        response_mask [B, T] bool; greedy_rewards [B].
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: arXiv:2310.10505.
    """
    baseline = greedy_rewards.double()
    mask = response_mask & (valid & baseline.isfinite())[:, None]
    return torch.where(mask, returns_to_go(token_rewards, mask, gamma=1.0) - baseline[:, None], 0.0).float()
