"""Generalised advantage estimation: a critic says what was to be expected at every token."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from posttrain.algos.returns import by_column, from_columns
from posttrain.algos.shapes import check_same_shape
from posttrain.algos.statistics import whiten
from posttrain.records.computed_tensors import by_rows
from posttrain.records.span_tensors import kept_rows
from posttrain.registry import ADVANTAGES
from posttrain.settings import Share


@ADVANTAGES.register("gae", by_rows=True)
def gae(
    token_rewards: Tensor,
    values: Tensor,
    valid: Tensor,
    response_mask: Tensor,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 1.0,
    estimator_whitens: bool = True,
) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lambda A_next, delta_t = r_t + gamma V_next - V_t, whitened over all tokens of the batch.

    Next is the row's next sampled token: tokens the policy did not sample are no steps of its own, so value and advantage
    are carried over them. After the last token both are 0 (the response has ended).

    Args: token_rewards and values [B, T], reward units; valid [B] bool (invalid responses leave the statistics and get 0);
        response_mask [B, T] bool.
    Settings:
        gamma: discount per sampled token.
        gae_lambda: 1 trusts the returns, 0 the critic.
        estimator_whitens: bring the advantages to mean 0 and variance 1 as part of the estimator; false, ROLL's
            default, leaves that to advantage.whiten.
    Returns: advantages [B, T] float32, in standard deviations over the batch; returns [B, T] float32, reward units: the
        advantages before whitening + values, what the critic learns. Both 0 where response_mask is False.
    Source: arXiv:1506.02438, equation 16; the whitening is the usual one of PPO codes.
    """
    check_same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    mask, inputs = kept_rows(response_mask, valid), (token_rewards, values)
    found = partial(_advantages, gamma=gamma, gae_lambda=gae_lambda)
    advantages = by_rows(found, *inputs, mask, dtype=torch.float64)
    returns = by_rows(_returns, advantages, values, mask, dtype=torch.float32)
    if estimator_whitens:
        advantages = whiten(advantages, mask)
    return by_rows(Tensor.float, advantages, dtype=torch.float32), returns


def _advantages(token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages before whitening, [B, T] float64; 0 where mask is False."""
    rewards, expected, sampled = by_column(token_rewards), by_column(values), by_column(mask)
    next_value, next_advantage, new, carried = (np.zeros(len(mask)) for _ in range(4))
    for reward, value, own in zip(rewards[::-1], expected[::-1], sampled[::-1], strict=True):
        np.multiply(next_value, gamma, out=new)
        np.add(reward, new, out=new)
        np.subtract(new, value, out=new)  # delta
        np.multiply(next_advantage, gamma * gae_lambda, out=carried)
        np.add(new, carried, out=new)
        np.putmask(next_advantage, own, new)
        np.putmask(next_value, own, value)
        reward[:] = next_advantage
    return torch.where(mask, from_columns(rewards, mask), 0.0)


def _returns(advantages: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Advantages + values, [B, T] float32; 0 where mask is False."""
    return torch.where(mask, advantages + values.double(), 0.0).float()
