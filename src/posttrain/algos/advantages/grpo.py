"""Group-relative advantages: a response is compared with the other responses to its prompt."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.groups import centered, compare_in_groups, on_tokens
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("grpo", compares_responses=True, standardizes_groups=True, per_response=True)
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
    baseline: 0, or its reward with lone_sample_keeps_reward (what verl and SkyRL do).

    Args: rewards [B] float; valid [B] bool; group_index [B] int64; response_mask [B, T] bool.
    Settings:
        normalize_by_std: divide by the group's standard deviation; false does not (Dr. GRPO, arXiv:2503.20783).
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, reward units (or standard deviations), 0 where response_mask is False.
    Source: arXiv:2402.03300, section 4.1.2.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return standardized(scores) if normalize_by_std else centered(scores)

    advantages = compare_in_groups(
        rewards, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
    )
    return on_tokens(advantages, response_mask)


def standardized(scores: Tensor) -> Tensor:
    """(scores - mean) / (sample standard deviation + 1e-6), [n]; exactly 0 when all are equal."""
    return centered(scores) / (scores.std() + 1e-6)
