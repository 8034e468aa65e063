"""Log-probs the update compares with."""

from __future__ import annotations

from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.batches import SequenceBatch
from posttrain.records.plans import UpdatePlan


def add_logprobs(
    batch: SequenceBatch, policy: ScoringEngine, reference: ScoringEngine | None, plan: UpdatePlan
) -> SequenceBatch:
    """log pi_old, unless the one update of this step computes it anyway, and log pi_ref, if there is a reference."""
    temperature = plan.loss.temperature
    return batch.with_logprobs(
        old=None if plan.on_policy else policy.logprobs(batch, temperature),
        ref=reference.logprobs(batch, temperature) if reference else None,
    )
