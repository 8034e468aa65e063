"""Group-relative advantages: a response is compared with the other responses to its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("grpo")
def grpo(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    normalize_by_std: bool = True,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """A = (r - mean of the group) / (standard deviation of the group + 1e-6), the same for every token of a response.

    The standard deviation is the sample one (divided by n - 1). Responses without a valid reward are not part of their
    group's mean or deviation and get 0. A group whose rewards are all equal gets exactly 0. A group of one has no
    baseline: 0, or its reward with lone_sample_keeps_reward (what verl does).

    Args: rewards [B] float; valid [B] bool; group_index [B] int64; response_mask [B, T] bool;
        normalize_by_std False leaves the division out (Dr. GRPO, arXiv:2503.20783).
    Returns: [B, T] float32, reward units (or standard deviations), 0 where response_mask is False.
    Source: arXiv:2402.03300, section 4.1.2.
    """
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for group in group_index[valid].unique():
        members = valid & (group_index == group)
        scores = rewards[members].double()
        if len(scores) == 1:
            advantages[members] = scores if lone_sample_keeps_reward else 0.0
        elif (scores == scores[0]).all():
            advantages[members] = 0.0  # the mean of equal floats need not be that float, so no subtraction here
        else:
            centered = scores - scores.mean()
            advantages[members] = centered / (scores.std() + 1e-6) if normalize_by_std else centered
    return torch.where(response_mask, advantages.float()[:, None], 0.0)
