"""On-policy RL with the optimal reward baseline: long responses weigh more in the baseline."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import compare_in_groups, on_tokens
from posttrain.records.span_tensors import row_counts
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("opo", compares_responses=True, per_response=True)
def opo(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """A = r - sum(length x r) / sum(length) over the group, the same for every token of a response.

    Length is the number of tokens the policy sampled. A group whose rewards are all equal, or whose responses are all
    empty, gets exactly 0. A group of one: 0, or its reward with lone_sample_keeps_reward (what verl does).

    Args: rewards [B]; valid [B] bool (invalid responses leave the baseline and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: arXiv:2505.23585, the optimal baseline with the gradient norm taken as proportional to length.
    """
    lengths = row_counts(response_mask).double()

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        weights = lengths[rows]
        if (scores == scores[0]).all() or weights.sum() == 0:
            return scores * 0.0
        return scores - (weights * scores).sum() / weights.sum()

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    return on_tokens(advantages, response_mask)
