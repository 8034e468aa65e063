"""REINFORCE over the turns of a conversation: the discount is per turn, not per token."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import ADVANTAGES
from posttrain.settings import Share


@ADVANTAGES.register("agentic_reinforce")
def agentic_reinforce(
    token_rewards: Tensor, valid: Tensor, response_mask: Tensor, turn_begins: Tensor, *, gamma: Share = 1.0
) -> Tensor:
    """A = C of the token's turn, with C = the turn's reward + gamma C of the next turn.

    A turn is what the policy sampled without a break; between two turns stands the environment's answer. A
    turn's reward is the sum over its tokens (ROLL takes its last token's alone, which loses a KL on the others). With one turn,
    every token gets the response's reward.

    Args: token_rewards [B, T]; valid [B] bool (invalid responses get 0); response_mask [B, T] bool; turn_begins [B, T] bool, True
        on the first token of every turn.
    Settings:
        gamma: discount per turn.
    Returns: [B, T] float32, reward units, 0 where response_mask is False.
    Source: ROLL's estimator of this name.
    """
    check_same_shape(token_rewards=token_rewards, response_mask=response_mask, turn_begins=turn_begins)
    mask = response_mask & valid[:, None]
    rewards = torch.where(mask, token_rewards.double(), 0.0)
    turn = turn_begins.long().cumsum(dim=1)  # 1, 2, ...; what follows a turn has its number too, and reward 0
    turns = int(turn.max()) if turn.numel() else 0
    returns = torch.zeros(len(mask), turns + 2, dtype=torch.float64, device=mask.device).scatter_add(1, turn, rewards)
    for number in reversed(range(1, turns + 1)):
        returns[:, number] += gamma * returns[:, number + 1]
    return torch.where(mask, returns.gather(1, turn), 0.0).float()
