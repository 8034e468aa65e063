"""Direct preference optimisation on pairs of a step's own responses, as weights of a policy gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algos.groups import on_tokens
from posttrain.registry import ADVANTAGES
from posttrain.settings import BelowHalf, Strength


@ADVANTAGES.register("online_dpo", one_update=True, pairs=True, aggregation="sequence_mean_token_sum")
def online_dpo(
    rewards: Tensor,
    valid: Tensor,
    response_mask: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    beta: Strength = 0.1,
    pair_loss: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: BelowHalf = 0.0,
    equal_rewards: Literal["skip", "first"] = "skip",
) -> Tensor:
    """Weights with which -A log pi has the gradient of DPO's loss, the mean over the pairs of the step.

    Rows 2i and 2i + 1 are a pair, two responses to a prompt where it has an even number of them. The one with the higher
    reward is chosen. h is the sum over the chosen response of policy - reference log-prob,
    less that of the rejected one; the loss of a pair is -(1 - e) log sigma(beta h) - e log sigma(-beta h), or for ipo
    (h - 1 / (2 beta))^2. With g = d loss / d h, the chosen response has A = -g n and the rejected one g n, on every token: n
    is the number of valid rows per pair that counts, so that the sum over all rows / their number is the mean over pairs.
    The weights are those of the policy before the update, so there is one update per step. It goes with the loss gpg and
    aggregation sequence_mean_token_sum.

    Args: rewards [B]; valid [B] bool (a pair without two valid rows gets 0); response_mask [B, T] bool; old_logprobs and
        ref_logprobs [B, T] nats.
    Settings:
        beta: nats of reward per nat of the difference of log-ratios.
        pair_loss: sigmoid is DPO's, ipo the squared distance to 1 / (2 beta).
        label_smoothing: share of pairs whose order is taken to be wrong (sigmoid).
        equal_rewards: pairs of equal rewards do not count, or their first response is chosen (verl's recipe).
    Returns: [B, T] float32, 0 where response_mask is False.
    Source: arXiv:2402.04792 (pairs of the policy's own responses), arXiv:2305.18290 (sigmoid), arXiv:2310.12036 (ipo); verl's
        recipe spin, which compares neighbours.
    """
    pairs = len(rewards) // 2
    log_ratios = torch.where(response_mask, old_logprobs.double() - ref_logprobs.double(), 0.0).sum(dim=1)
    first, second = log_ratios[: 2 * pairs].view(pairs, 2).unbind(dim=1)
    better = rewards[: 2 * pairs].view(pairs, 2)
    sign = torch.where(better[:, 0] >= better[:, 1], 1.0, -1.0).double()
    h = sign * (first - second)
    if pair_loss == "sigmoid":
        slope = beta * (label_smoothing * torch.sigmoid(beta * h) - (1 - label_smoothing) * torch.sigmoid(-beta * h))
    else:
        slope = 2 * (h - 1 / (2 * beta))
    meant = valid[: 2 * pairs].view(pairs, 2).all(dim=1)
    if equal_rewards == "skip":
        meant &= better[:, 0] != better[:, 1]
    scale = int(valid.sum()) / max(int(meant.sum()), 1)
    weights = torch.where(meant, -slope * sign * scale, 0.0)
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    advantages[: 2 * pairs] = torch.stack([weights, -weights], dim=1).flatten()
    return on_tokens(advantages, response_mask)
