"""REINFORCE++ with a group baseline: centred in the group, scaled over the batch."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import centered, compare_in_groups
from posttrain.algos.statistics import whiten
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("reinforce_plus_plus_baseline", compares_responses=True)
def reinforce_plus_plus_baseline(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """r - mean of the group on every token, then whitened over all tokens of the batch (so long responses weigh more).

    A group of one: 0 before whitening, or its reward with lone_sample_keeps_reward (what verl does).

    Args: rewards [B]; valid [B] bool (invalid responses leave both statistics and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, in standard deviations over the batch, 0 where response_mask is False.
    Source: arXiv:2501.03262, the variant for several responses per prompt.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return centered(scores)

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    mask = response_mask & valid[:, None]
    return whiten(advantages[:, None].expand(mask.shape), mask).float()
