"""REINFORCE: what comes after a token is what it is worth."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from posttrain.algos.returns import returns_to_go
from posttrain.records.computed_tensors import by_rows
from posttrain.records.span_tensors import kept_rows
from posttrain.registry import ADVANTAGES
from posttrain.settings import Share


@ADVANTAGES.register("reinforce", by_rows=True)
def reinforce(token_rewards: Tensor, valid: Tensor, response_mask: Tensor, *, gamma: Share = 1.0) -> Tensor:
    """A = the discounted return from the token on: no baseline and no statistic.

    A baseline comes from the reward's normalisation (reward.normalize_mean) or from advantage.whiten, as ROLL means it. Tokens
    that the policy did not sample are skipped, and the return is carried over them without a discount. With
    reward.normalize_mean and normalize_std of the group it is GRPO, and that with a KL in the reward.

    Args: token_rewards [B, T]; valid [B] bool (invalid responses get 0); response_mask [B, T] bool.
    Settings:
        gamma: discount per sampled token.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: R. Williams, "Simple statistical gradient-following algorithms", 1992; ROLL's estimator of this name.
    """
    found = partial(returns_to_go, gamma=gamma)
    returns = by_rows(found, token_rewards, kept_rows(response_mask, valid), dtype=torch.float64)
    return by_rows(Tensor.float, returns, dtype=torch.float32)
