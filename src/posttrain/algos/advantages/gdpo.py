"""Group reward-decoupled normalisation: each term of the reward is standardised in its group before they are summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.algos.advantages.grpo import standardized
from posttrain.algos.groups import compare_in_groups
from posttrain.algos.statistics import whiten
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("gdpo")
def gdpo(
    reward_terms: Mapping[str, Tensor],
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    term_weights: Mapping[str, float] | None = None,
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """GRPO's advantage of every reward term, weighted and summed, then whitened over all tokens of the batch.

    So a term with a small spread counts as much as one with a large spread.

    Args: reward_terms, name -> [B]; valid [B] bool (invalid responses leave all statistics and get 0);
        group_index [B] int64; response_mask [B, T] bool; term_weights by name, 1 where none is given.
    Returns: [B, T] float32, in standard deviations over the batch, 0 where response_mask is False.
    Source: arXiv:2601.05242.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return standardized(scores)

    total = torch.zeros_like(group_index, dtype=torch.float64)
    for name, scores in reward_terms.items():
        total += (term_weights or {}).get(name, 1.0) * compare_in_groups(
            scores, valid, group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
        )
    mask = response_mask & valid[:, None]
    return whiten(total[:, None].expand(mask.shape), mask).float()
