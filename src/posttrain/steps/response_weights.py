"""Weights of responses in the policy loss, by difficulty and length, as ROLL's difficulty_loss_weight and length_loss_weight.

ROLL measures lengths against those of a micro-batch, and brings its weights to mean 1; here both are over the step, so that
splitting a batch differently changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import ScoredGroup

DIFFICULTY = "difficulty"  # column of a row's difficulty, 0 to 1


def sampled_lengths(groups: Sequence[ScoredGroup]) -> list[int]:
    """Return the sampled tokens of every trajectory, in order."""
    return [each.sampled_tokens for group in groups for each in group.group.trajectories]


def response_weights(groups: Sequence[ScoredGroup], lengths: Sequence[int], weigh_by: Sequence[str]) -> Tensor:
    """Return the weight of every trajectory, in order; their mean is 1.

    difficulty: 0.5 + 1.5 x the difficulty of its prompt, cut to 0 to 1. length: 1.5 - (length - shortest) / (longest - shortest).

    Returns: [trajectories] float32. Raises: RunStopped when a prompt has no difficulty.
    """
    weights = torch.ones(len(lengths))
    if DIFFICULTY in weigh_by:
        each = [_difficulty(group.group.prompt) for group in groups for _ in group.group.trajectories]
        weights = weights * (0.5 + 1.5 * torch.tensor(each).clamp(0, 1))
    if "length" in weigh_by:
        tokens = torch.tensor(lengths, dtype=torch.float32)
        spread = tokens.max() - tokens.min()
        weights = weights * (1.5 - (tokens - tokens.min()) / spread) if spread > 0 else weights
    return weights * (len(weights) / weights.sum())


def _difficulty(prompt: Prompt) -> float:
    value = prompt.extra_info.get(DIFFICULTY)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise RunStopped(
            f"{prompt.prompt_id} has {value!r} for {DIFFICULTY}, and loss.weigh_by asks for a number; read the column with "
            f"data.extra_columns=[{DIFFICULTY}], or leave it out of loss.weigh_by"
        )
    return float(value)
