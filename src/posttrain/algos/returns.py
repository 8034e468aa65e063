"""Returns: the sum of the rewards on a token and the tokens after it."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_next, where next is the row's next masked-in token.

    Tokens that the policy did not sample (tool output, padding) are no steps of its own: they have no return, their
    reward is not counted, and the return is carried over them without a discount.

    Args: token_rewards [B, T]; mask [B, T] bool; gamma in [0, 1].
    Returns: [B, T] float64, reward units; 0 where mask is False.
    """
    check_same_shape(token_rewards=token_rewards, mask=mask)
    rewards = token_rewards.double()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):  # a closed form needs gamma^-t, which overflows in long responses
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return torch.where(mask, returns, 0.0)
