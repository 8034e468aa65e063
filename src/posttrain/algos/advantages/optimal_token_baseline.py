"""A baseline for every token position that minimises the variance of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.groups import groups_of
from posttrain.algos.returns import returns_to_go
from posttrain.algos.shapes import check_same_shape
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("optimal_token_baseline")
def optimal_token_baseline(
    token_rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
) -> Tensor:
    """A_t = G_t - b_t with b_t = sum(G_t W_t) / (sum(W_t) + 1e-8) over the group's responses that have a token at position t.

    G is the undiscounted return from the token on. W_t is the sum up to t of w = 1 - 2 pi(token) + sum over the vocabulary
    of pi^2, which is the squared norm of the token's gradient with respect to the logits. A longest response would be
    compared with itself beyond the second longest's number of tokens, so its baseline is 0 there; a group of one has
    baseline 0. With tool output inside the responses use tir_optimal_token_baseline, which lines up the sampled tokens.

    Args: token_rewards [B, T]; valid [B] bool (invalid responses leave the baseline and get 0); group_index [B] int64;
        response_mask [B, T] bool; old_logprobs [B, T] nats; sum_pi_squared [B, T] in (0, 1].
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: verl 0.9's optimal_token_baseline.
    """
    mask = response_mask & valid[:, None]
    returns, path = _returns_and_path(token_rewards, mask, old_logprobs, sum_pi_squared)
    return _minus_baseline(returns, path, mask, valid, group_index).float()


def _returns_and_path(
    token_rewards: Tensor, mask: Tensor, old_logprobs: Tensor, sum_pi_squared: Tensor
) -> tuple[Tensor, Tensor]:
    """G and W, both [B, T] float64."""
    check_same_shape(token_rewards=token_rewards, mask=mask, old_logprobs=old_logprobs, sum_pi_squared=sum_pi_squared)
    weights = 1 - 2 * old_logprobs.double().exp() + sum_pi_squared.double()
    return returns_to_go(token_rewards, mask, gamma=1.0), torch.where(mask, weights, 0.0).cumsum(dim=1)


def _minus_baseline(returns: Tensor, path: Tensor, mask: Tensor, valid: Tensor, group_index: Tensor) -> Tensor:
    """returns - baseline of the group at the same position, [B, T] float64; 0 where mask is False."""
    baseline = torch.zeros_like(returns)
    positions = torch.arange(mask.shape[1], device=mask.device)
    for rows in groups_of(group_index, valid):
        if len(rows) == 1:
            continue
        weights = torch.where(mask[rows], path[rows], 0.0)
        at_position = (returns[rows] * weights).sum(dim=0) / (weights.sum(dim=0) + 1e-8)
        lengths = mask[rows].sum(dim=1)
        second = lengths.sort(descending=True).values[1]
        has_others = (lengths <= second)[:, None] | (positions < second)
        baseline[rows] = torch.where(has_others, at_position, 0.0)
    return torch.where(mask, returns - baseline, 0.0)
