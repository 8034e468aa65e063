"""Correct a sampler whose log-probs are not the trainer's: weights on the token losses, and tokens left out of the loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from posttrain.algos.rollout_correction import importance_weights, rejection_mask
from posttrain.records.batches import SequenceBatch, ShapedBatch, TrainerLogprobs
from posttrain.records.plans import RolloutCorrectionPlan


def correct_rollout(batch: SequenceBatch, logprobs: TrainerLogprobs, plan: RolloutCorrectionPlan) -> TrainerLogprobs:
    """Add importance weights and rejected tokens, from the gap between trainer and sampler over the whole step.

    Weights come first, so that their mean, where they are divided by it, is over all sampled tokens.
    """
    old, mask = logprobs.old, batch.response_mask
    assert old is not None, "a correction compares the trainer's log-probs with the sampler's"
    weights = rejected = None
    if plan.weights != "none":
        weights = importance_weights(
            old,
            batch.rollout_logprobs,
            mask,
            level=plan.weights,
            high=plan.weight_high,
            low=plan.weight_low,
            normalize=plan.normalize,
        )
    if plan.rules:
        kept = mask
        for rule in plan.rules:
            kept = kept & rejection_mask(
                old,
                batch.rollout_logprobs,
                mask,
                statistic=rule.statistic,
                reduction=rule.reduction,
                high=rule.high,
                low=rule.low,
            )
        rejected = mask & ~kept
    return replace(logprobs, importance_weights=weights, rejected=rejected)


def rewards_on_kept_tokens(shaped: ShapedBatch) -> Tensor:
    """Token rewards [B, T], where those of rejected tokens stand on the last token that was kept of their row, or of the row
    before in their trajectory: what a response was worth must not go with its last token."""
    rewards, batch = shaped.rewards_on_tokens(), shaped.sequences
    if shaped.logprobs.rejected is None:
        return rewards
    kept = shaped.logprobs.kept(batch.response_mask)
    positions = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    is_last = kept & (positions == (kept * positions).amax(dim=1, keepdim=True))
    moved = torch.where(batch.response_mask & ~kept, rewards, 0.0).sum(dim=1, keepdim=True)
    empty, trajectories = ~kept.any(dim=1), batch.trajectory_index
    for row in (empty & (moved[:, 0] != 0)).nonzero()[:, 0].tolist():
        before = ((trajectories[:row] == trajectories[row]) & ~empty[:row]).nonzero()[:, 0]
        if len(before):
            moved[before[-1]] += moved[row]
    return torch.where(kept, rewards, 0.0) + torch.where(is_last, moved, 0.0)
