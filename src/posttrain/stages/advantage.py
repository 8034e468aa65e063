"""From rewards to what each token is worth."""

from __future__ import annotations

from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import AdvantagePlan
from posttrain.registry import ADVANTAGES


def estimate_advantages(batch: SequenceBatch, plan: AdvantagePlan) -> TrainBatch:
    """A_{i,t} by the chosen estimator. Responses without a valid reward are left out of the loss."""
    estimator = ADVANTAGES.get(plan.name)
    advantages = estimator(batch.rewards, batch.valid, batch.group_index, batch.response_mask, **plan.parameters)
    return TrainBatch(
        sequences=batch, advantages=advantages, loss_mask=batch.response_mask & batch.valid[:, None]
    )
