"""Log-probs the update compares with, and what else is known from them."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algos.rollout_correction import importance_weights, rejection_mask
from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.batches import SequenceBatch
from posttrain.records.plans import RolloutCorrectionPlan, UpdatePlan


def add_logprobs(
    batch: SequenceBatch, policy: ScoringEngine, reference: ScoringEngine | None, plan: UpdatePlan
) -> SequenceBatch:
    """log pi_old, unless nothing needs it before the update, and log pi_ref, if there is a reference; then the correction of
    the gap between sampler and trainer, if there is one."""
    temperature = plan.loss.temperature
    batch = batch.with_logprobs(
        old=None if plan.on_policy else policy.logprobs(batch, temperature),
        ref=reference.logprobs(batch, temperature) if reference else None,
    )
    return correct_rollout(batch, plan.correction) if plan.correction else batch


def add_sum_pi_squared(batch: SequenceBatch, policy: ScoringEngine, temperature: float) -> SequenceBatch:
    """The sum of the squared probabilities of the whole vocabulary, at every response token."""
    return replace(batch, sum_pi_squared=policy.sum_pi_squared(batch, temperature))


def correct_rollout(batch: SequenceBatch, plan: RolloutCorrectionPlan) -> SequenceBatch:
    """Importance weights and rejected tokens, from the gap between trainer and sampler over the whole step.

    Weights come first, so that their mean, where they are divided by it, is over all sampled tokens.
    """
    old, mask = batch.old_logprobs, batch.response_mask
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
    return replace(batch, importance_weights=weights, rejected=rejected)
