"""Update the policy, and the critic, on one step's sequences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.interfaces.train_engine import TrainEngine, ValueEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import CriticUpdatePlan, UpdatePlan
from posttrain.records.statistics import ForwardBackwardStats, LossStats, UpdateStats
from posttrain.steps.mini_batches import run_mini_batches


def update(
    policy: TrainEngine, batch: TrainBatch, plan: UpdatePlan, on_sequences: Callable[[int], None] | None = None
) -> UpdateStats:
    """plan.epochs passes over the batch, an optimizer step per mini-batch; see run_mini_batches."""
    first_logprobs: list[Tensor] = []

    def learn(mini_batch: TrainBatch, epoch: int) -> ForwardBackwardStats:
        stats = policy.forward_backward(mini_batch, plan.loss, mini_batch.counts())
        if epoch == 0:
            first_logprobs.append(stats.policy_logprobs)
        return stats

    metrics, updates, skipped = run_mini_batches(
        policy,
        learn,
        batch,
        role="policy",
        epochs=plan.epochs,
        sequences_per_update=plan.sequences_per_update,
        on_sequences=on_sequences,
    )
    old = batch.sequences.old_logprobs
    return UpdateStats(
        metrics=metrics,
        trainer_logprobs=old if old is not None else first_logprobs[0],
        updates=updates,
        skipped_updates=skipped,
    )


def update_critic(
    critic: ValueEngine, batch: TrainBatch, plan: CriticUpdatePlan, on_sequences: Callable[[int], None] | None = None
) -> UpdateStats:
    """The same for the critic, on the value loss: its values move towards the returns."""

    def learn(mini_batch: TrainBatch, epoch: int) -> LossStats:
        return critic.forward_backward(mini_batch, plan.loss, mini_batch.counts())

    metrics, updates, skipped = run_mini_batches(
        critic,
        learn,
        batch,
        role="critic",
        epochs=plan.epochs,
        sequences_per_update=plan.sequences_per_update,
        on_sequences=on_sequences,
    )
    return UpdateStats(metrics=metrics, trainer_logprobs=None, updates=updates, skipped_updates=skipped)


def merged(batch: TrainBatch, policy: UpdateStats | None, critic: UpdateStats | None) -> UpdateStats:
    """One step's updates of all models as one; None stands for a model that was not to be updated in this step.

    ``updates`` is the number that the model with fewer of them made, so a step in which the policy or the critic could not
    learn at all is seen to be one; a warm-up step, in which only the critic is due, is not.
    """
    due = [stats for stats in (policy, critic) if stats is not None]
    return UpdateStats(
        metrics={name: value for stats in due for name, value in stats.metrics.items()},
        trainer_logprobs=policy.trainer_logprobs if policy else batch.sequences.old_logprobs,
        updates=min(stats.updates for stats in due),
        skipped_updates=sum(stats.skipped_updates for stats in due),
    )
