"""Rewards less the soft mean of the step's, the target of the loss of the same name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algos.groups import on_tokens
from posttrain.registry import ADVANTAGES
from posttrain.settings import NonNegative


@ADVANTAGES.register("sppo", per_response=True)
def sppo(rewards: Tensor, valid: Tensor, response_mask: Tensor, *, soft_mean_scale: NonNegative = 1.0) -> Tensor:
    """A = r - soft mean of all rewards of the step, the same for every token of a response.

    The soft mean is log(mean of exp(scale x r)) / scale: the mean for scale 0, near the largest reward for a large one. All
    prompts of the step share it, so that one response per prompt is enough.

    Args: rewards [B]; valid [B] bool (invalid responses leave the mean and get 0); response_mask [B, T] bool.
    Settings:
        soft_mean_scale: weight of high rewards in the soft mean; 0 is the mean.
    Returns: [B, T] float32, reward units, 0 where response_mask is False. Exactly 0 when all rewards are equal.
    Source: verl's recipe sppo, where it stands for the win rate less 1/2 of arXiv:2405.00675.
    """
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    scores = rewards[valid].double()
    if len(scores) and not (scores == scores[0]).all():
        advantages[valid] = scores - soft_mean(scores, soft_mean_scale)
    return on_tokens(advantages, response_mask)


def soft_mean(scores: Tensor, scale: float) -> Tensor:
    """log(mean of exp(scale x scores)) / scale of [n] scores; their mean for scale 0."""
    if scale == 0:
        return scores.mean()
    return (torch.logsumexp(scores * scale, dim=0) - math.log(len(scores))) / scale
