"""Trajectories of several rows, one per step of the environment: returns over the steps, and back to every step."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.groups import groups_of, on_tokens


def step_returns(
    step_rewards: Tensor, valid: Tensor, trajectory_index: Tensor, step_index: Tensor, gamma: float
) -> Tensor:
    """R = r + gamma R of the trajectory's next step.

    Args: step_rewards [B], of single steps; valid [B] bool, the other rows are no steps of their trajectory;
        trajectory_index [B] int64, equal for the steps of a trajectory; step_index [B] int64, rises along it.
    Returns: [B] float64, reward units; 0 where not valid.
    """
    returns = torch.zeros_like(step_rewards, dtype=torch.float64)
    for rows in groups_of(trajectory_index, valid):
        running = 0.0
        for row in rows[step_index[rows].argsort(descending=True)].tolist():
            running = float(step_rewards[row]) + gamma * running
            returns[row] = running
    return returns


def last_steps(valid: Tensor, trajectory_index: Tensor, step_index: Tensor) -> Tensor:
    """The row that holds the last step of each row's trajectory.

    What is estimated for last steps alone (``valid & (last_steps(...) == row number)``) reaches the other steps by indexing
    with this: SkyRL's step-wise training.

    Args: as in step_returns.
    Returns: [B] int64; a row that is not valid is its own.
    """
    last = torch.arange(len(valid), device=valid.device)
    for rows in groups_of(trajectory_index, valid):
        last[rows] = rows[step_index[rows].argmax()]
    return last


def discounted_on_tokens(per_step: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """One number per step, on each of its sampled tokens, times gamma for every sampled token that follows.

    By hand: 8 on three tokens with gamma = 0.5 is 2, 4, 8.

    Args: per_step [B]; response_mask [B, T] bool.
    Returns: [B, T] float32; 0 where response_mask is False.
    """
    later = response_mask.flip(1).cumsum(dim=1).flip(1) - 1
    return on_tokens(per_step, response_mask) * gamma ** later.clamp(min=0)
