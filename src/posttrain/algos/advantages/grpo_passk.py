"""Pass@k in groups: only the best response to a prompt is rewarded, by how far it leads."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.groups import compare_in_groups, on_tokens
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("grpo_passk", compares_responses=True, per_response=True)
def grpo_passk(
    rewards: Tensor, valid: Tensor, group_index: Tensor, response_mask: Tensor, *, normalize_by_std: bool = True
) -> Tensor:
    """A = (best - second best) / (sample standard deviation of the group + 1e-6) for the best response, 0 for all others.

    When the two best are equal all get 0, and so does a group of one.

    Args: rewards [B]; valid [B] bool (invalid responses take no part and get 0); group_index [B] int64;
        response_mask [B, T] bool.
    Settings:
        normalize_by_std: divide by the group's standard deviation; false does not.
    Returns: [B, T] float32, reward units (or standard deviations), 0 where response_mask is False.
    Source: arXiv:2503.19595, the pass@k objective with k = the group's size.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        (best, second), _ = scores.topk(2)
        lead = (best - second) / (scores.std() + 1e-6) if normalize_by_std else best - second
        return torch.where(scores == best, lead, 0.0)

    advantages = compare_in_groups(rewards, valid, group_index, compare, lone_sample_keeps_reward=False)
    return on_tokens(advantages, response_mask)
