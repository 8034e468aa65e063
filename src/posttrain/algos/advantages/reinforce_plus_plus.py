"""REINFORCE++: discounted returns, whitened over the batch; no group and no critic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from posttrain.algos.returns import returns_to_go
from posttrain.algos.statistics import whiten
from posttrain.records.computed_tensors import by_rows
from posttrain.records.span_tensors import kept_rows
from posttrain.registry import ADVANTAGES
from posttrain.settings import Share


@ADVANTAGES.register("reinforce_plus_plus", by_rows=True)
def reinforce_plus_plus(token_rewards: Tensor, valid: Tensor, response_mask: Tensor, *, gamma: Share = 1.0) -> Tensor:
    """A = the discounted return from the token on, whitened over all tokens of the batch.

    Tokens that the policy did not sample are skipped, and the return is carried over them. (verl 0.5 and SkyRL cut the
    return there instead, which takes the reward away from every turn but the last.)

    Args: token_rewards [B, T]; valid [B] bool (invalid responses leave the statistics and get 0);
        response_mask [B, T] bool.
    Settings:
        gamma: discount per sampled token.
    Returns: [B, T] float32, in standard deviations over the batch, 0 where response_mask is False.
    Source: arXiv:2501.03262.
    """
    mask = kept_rows(response_mask, valid)
    returns = by_rows(partial(returns_to_go, gamma=gamma), token_rewards, mask, dtype=torch.float64)
    return by_rows(Tensor.float, whiten(returns, mask), dtype=torch.float32)
