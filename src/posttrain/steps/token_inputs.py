"""Inputs of advantage estimators that are numbers per token, [B, T]: made only for an estimator that names them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.algos.statistics import whiten_parts
from posttrain.records.batches import ShapedBatch
from posttrain.records.plans import AdvantagePlan
from posttrain.steps.correction import rewards_on_kept_tokens


def token_rewards(shaped: ShapedBatch, plan: AdvantagePlan) -> Tensor:
    """The rewards of responses on tokens, normalised and clipped, less the KL; whitened as in the plan."""
    rewards, scored = rewards_on_kept_tokens(shaped), shaped.scored
    if not plan.whiten_rewards:
        return rewards
    # most tokens have reward 0, and get the same small offset
    kept = shaped.logprobs.kept(shaped.sequences.response_mask)
    return whiten_parts(rewards, kept & scored.valid[:, None], scored.part_index)


def token_scores(shaped: ShapedBatch, plan: AdvantagePlan) -> Tensor:
    """The rewards of responses as scored, on the last token."""
    return torch.where(shaped.sequences.last_tokens, shaped.scored.rewards[:, None], 0.0)


TOKEN_INPUTS: dict[str, Callable[[ShapedBatch, AdvantagePlan], Tensor]] = {
    "token_rewards": token_rewards,
    "token_scores": token_scores,
    "response_tokens": lambda shaped, plan: shaped.sequences.tokens[:, shaped.sequences.prompt_width :],
    "turn_begins": lambda shaped, plan: shaped.sequences.turn_begins,
}
