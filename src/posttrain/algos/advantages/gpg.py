"""Group policy gradient: centred rewards, scaled up by how few responses carry a signal."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import centered, compare_in_groups, on_tokens
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("gpg", compares_responses=True, per_response=True)
def gpg(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """A = (valid responses / valid responses with a reward other than 0) x (r - mean of the group), for every token.

    Both are counted over the whole batch. Goes with the policy loss of the same name. A group of one: 0, or its (scaled)
    reward with lone_sample_keeps_reward (what verl does).

    Args: rewards [B]; valid [B] bool (invalid responses leave baseline and counts, and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: arXiv:2504.02546. The paper leaves out of the count the responses of groups without a signal; this is verl's
        form, which leaves out those with a reward of 0.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return centered(scores)

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    scale = valid.sum().double() / (valid & (rewards != 0)).sum().clamp(min=1)
    return on_tokens(scale * advantages, response_mask)
