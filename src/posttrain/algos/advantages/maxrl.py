"""Maximum-likelihood RL: centred rewards over the group's mean, so that rarely solved prompts weigh more."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import centered, compare_in_groups, on_tokens
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("maxrl", compares_responses=True, per_response=True)
def maxrl(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """A = (r - mean of the group) / (mean of the group + 1e-6), the same for every token of a response.

    Meant for rewards of 0 and 1, where the mean is the share solved; with a negative mean the sign of A turns round.
    A group of one: 0, or its reward with lone_sample_keeps_reward (what SkyRL does).

    Args: rewards [B]; valid [B] bool (invalid responses leave the mean and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, 0 where response_mask is False.
    Source: "Maximum Likelihood Reinforcement Learning", 2026; the formula is SkyRL 0.3's.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return centered(scores) / (scores.mean() + 1e-6)

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    return on_tokens(advantages, response_mask)
