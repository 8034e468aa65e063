"""REINFORCE over the steps of an environment: every step is worth what it and the steps after it bring."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import on_tokens
from posttrain.algos.steps import step_returns
from posttrain.registry import ADVANTAGES
from posttrain.settings import Share


@ADVANTAGES.register("step_reinforce")
def step_reinforce(
    step_rewards: Tensor,
    valid: Tensor,
    trajectory_index: Tensor,
    step_index: Tensor,
    response_mask: Tensor,
    *,
    step_gamma: Share = 0.95,
) -> Tensor:
    """A = R = r + step_gamma R of the trajectory's next step, the same for every token of the step's response.

    A row is a step: what the policy saw and what it answered. ROLL normalises R like a reward, before it is spread.

    Args: step_rewards [B]; valid [B] bool (other steps get 0 and are passed over); trajectory_index [B] int64, equal for the
        steps of a trajectory; step_index [B] int64, rises along it; response_mask [B, T] bool.
    Settings:
        step_gamma: discount per step of the environment.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: ROLL's estimator of this name.
    """
    returns = step_returns(step_rewards, valid, trajectory_index, step_index, step_gamma)
    return on_tokens(returns, response_mask)
