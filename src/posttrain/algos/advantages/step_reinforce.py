"""REINFORCE over the steps of an environment: every step is worth what it and the steps after it bring."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.algos.reward_normalization import RunningMoments, normalize_rewards
from posttrain.algos.steps import discounted_on_tokens, step_returns
from posttrain.registry import ADVANTAGES
from posttrain.settings import Positive, Share


@ADVANTAGES.register("step_reinforce")
def step_reinforce(
    step_rewards: Tensor,
    valid: Tensor,
    trajectory_index: Tensor,
    step_index: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    *,
    step_gamma: Share = 0.95,
    returns_mean: Literal["none", "group", "batch"] = "none",
    returns_std: Literal["none", "group", "batch"] = "none",
    returns_clip: Positive | None = None,
    token_gamma: Share = 1.0,
) -> Tensor:
    """A = R = r + step_gamma R of the trajectory's next step, on every token of the step's response.

    A row is a step: what the policy saw and what it answered. R may be normalised like a reward before it is spread:
    (R - mean) / (std + 1e-6), over the steps of the group's trajectories or of the batch.

    Args: step_rewards [B]; valid [B] bool (other steps get 0 and are passed over); trajectory_index [B] int64, equal for the
        steps of a trajectory; step_index [B] int64, rises along it; response_mask [B, T] bool; group_index [B] int64, equal
        for trajectories from the same start.
    Settings:
        step_gamma: discount per step of the environment.
        returns_mean: subtract the mean of the returns of the group, or of the batch.
        returns_std: divide by the standard deviation of the returns of the group, or of the batch.
        returns_clip: returns are cut to plus or minus this after that; null does not cut.
        token_gamma: discount per token of a step's response, backwards from its last.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: ROLL's estimator of this name.
    """
    returns = step_returns(step_rewards, valid, trajectory_index, step_index, step_gamma)
    if (returns_mean, returns_std) != ("none", "none"):
        returns = normalize_rewards(returns, valid, group_index, RunningMoments(), mean=returns_mean, std=returns_std)
    if returns_clip is not None:
        returns = returns.clamp(-returns_clip, returns_clip)
    return discounted_on_tokens(returns, response_mask, token_gamma)
