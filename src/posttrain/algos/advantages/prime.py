"""Rewards of tokens from a process reward model beside the reward of the outcome, each with a leave-one-out baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.groups import groups_of
from posttrain.algos.ratio import row_mean
from posttrain.algos.returns import returns_to_go
from posttrain.algos.statistics import whiten
from posttrain.registry import ADVANTAGES
from posttrain.settings import NonNegative


@ADVANTAGES.register("prime")
def prime(
    process_rewards: Tensor,
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    process_weight: NonNegative = 5.0,
    outcome_weight: NonNegative = 5.0,
) -> Tensor:
    """A_t = sum from t on of process_weight x RLOO(process rewards) + outcome_weight x RLOO(reward, on the last token), whitened.

    RLOO of n responses is n / (n - 1) x value - sum of the n responses' means / (n - 1), where the mean of a response is over its
    tokens for process rewards and is its reward for the outcome. Both parts of a lone response are 0. Whitened over all tokens of
    the step.

    Args: process_rewards [B, T] and rewards [B], reward units; valid [B] bool (invalid responses have no part and get 0);
        group_index [B] int64; response_mask [B, T] bool.
    Settings:
        process_weight: weight of the process rewards.
        outcome_weight: weight of the reward of the response.
    Returns: [B, T] float32, standard deviations, 0 where response_mask is False.
    Source: arXiv:2502.01456, algorithm 1; weights and whitening are those of verl's recipe prime.
    """
    mask = response_mask & valid[:, None]
    of_tokens = torch.where(mask, process_rewards.double(), 0.0)
    means = row_mean(of_tokens, mask).squeeze(1)
    process, outcome = torch.zeros_like(of_tokens), torch.zeros(len(valid), dtype=torch.float64, device=mask.device)
    for rows in groups_of(group_index, valid & mask.any(dim=1)):
        n = len(rows)
        if n > 1:
            process[rows] = of_tokens[rows] * n / (n - 1) - means[rows].sum() / (n - 1)
            outcome[rows] = leave_one_out(rewards[rows].double())
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    combined = process_weight * process + torch.where(last, outcome_weight * outcome[:, None], 0.0)
    returns = returns_to_go(torch.where(mask, combined, 0.0), mask, gamma=1.0)
    return whiten(returns, mask).float()


def leave_one_out(scores: Tensor) -> Tensor:
    """Scores less the mean of the others, [n]; exactly 0 when all are equal. Needs two or more."""
    if (scores == scores[0]).all():
        return torch.zeros_like(scores)
    return (scores - scores.mean()) * (len(scores) / (len(scores) - 1))
