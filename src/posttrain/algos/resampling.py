"""Probabilities of drawing the responses of a step again, by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps a draw possible where every weight is 0: all responses are then equally likely.
FLOOR = 1e-8
BEST, OTHERS = 0.4, 0.1


def draw_weights(scores: Tensor, valid: Tensor, *, weights: str, exponent: float) -> Tensor:
    """Unnormalised probabilities of responses. For scores 0, 1, 2 and the exponent 2, power gives 0, 1, 4 (plus 1e-8 each).

    Args: scores [B] reward units; valid [B] bool; weights: power, extremes or best.
    Returns: [B] float64, 0 where a response has no valid score.
    Raises: ValueError for other weights.
    Source: PF-PPO, arXiv:2409.06957; the three forms and the floor are verl's (pow, max_min, max_random).
    """
    known = scores.double()
    highest = torch.where(valid, known, -torch.inf).max()
    lowest = torch.where(valid, known, torch.inf).min()
    if weights == "power":
        found = known.abs() ** exponent
    elif weights == "extremes":
        found = ((known == highest) | (known == lowest)).double()
    elif weights == "best":
        found = torch.full_like(known, OTHERS).masked_fill(known == highest, BEST)
    else:
        raise ValueError(f"no weights {weights}: power, extremes and best are known")
    return torch.where(valid, found + FLOOR, 0.0)
