"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import centered, compare_in_groups, on_tokens
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("rloo", compares_responses=True, per_response=True)
def rloo(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """A = r - mean of the other responses to the prompt, the same for every token of a response.

    With n responses that is n / (n - 1) times (r - mean of all). A group of one has no baseline: 0 (as in SkyRL and verl's
    rloo_vectorized), or its reward with lone_sample_keeps_reward (verl's rloo).

    Args: rewards [B]; valid [B] bool (invalid responses leave the baseline and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: arXiv:2402.14740.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return centered(scores) * (len(scores) / (len(scores) - 1))

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    return on_tokens(advantages, response_mask)
