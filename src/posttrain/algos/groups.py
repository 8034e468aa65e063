"""Responses to one prompt, compared with each other: what the group-relative advantage estimators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.records.span_tensors import spread


def groups_of(group_index: Tensor, valid: Tensor) -> Sequence[Tensor]:
    """The rows of each group that has valid rows, one group after the other.

    Args: group_index [B] int64; valid [B] bool. Rows of a group need not stand together.
    Returns: row numbers [n] int64, ascending; rows that are not valid belong to no group.
    """
    rows = valid.nonzero().squeeze(1)
    rows = rows[group_index[rows].argsort(stable=True)]
    _, sizes = group_index[rows].unique_consecutive(return_counts=True)
    return rows.split(sizes.tolist())


def centered(scores: Tensor) -> Tensor:
    """scores - their mean; exactly 0 when all are equal, although the mean of equal floats need not be that float."""
    return torch.zeros_like(scores) if (scores == scores[0]).all() else scores - scores.mean()


def compare_in_groups(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    compare: Callable[[Tensor, Tensor], Tensor],
    *,
    lone_sample_keeps_reward: bool,
) -> Tensor:
    """``compare`` applied to every group of two or more valid responses.

    A group of one has nothing to compare with: 0, or its reward with lone_sample_keeps_reward.

    Args: rewards [B]; valid [B] bool; group_index [B] int64; compare gets a group's rewards [n] float64 and its rows [n]
        and returns [n].
    Returns: [B] float64; 0 where not valid.
    """
    compared = torch.zeros_like(rewards, dtype=torch.float64)
    groups = groups_of(group_index, valid)
    whole = torch.cat([compared[:0].long(), *groups])  # taken and put back at once, not a group at a time
    scores = rewards[whole].double().split([len(rows) for rows in groups])
    found = [
        compare(own, rows) if len(rows) > 1 else own if lone_sample_keeps_reward else torch.zeros_like(own)
        for own, rows in zip(scores, groups, strict=True)
    ]
    compared[whole] = torch.cat([compared[:0], *found])
    return compared


def on_tokens(per_response: Tensor, response_mask: Tensor) -> Tensor:
    """One number per response, on each of its sampled tokens.

    Args: per_response [B]; response_mask [B, T] bool.
    Returns: [B, T] float32; 0 where response_mask is False. Unread where the mask is (records.span_tensors).
    """
    return spread(per_response.float(), response_mask)
