"""Update the policy, and the critic, on one step's sequences: passes over them with an optimizer step per mini-batch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.train_engine import MakesUpdates, TrainEngine, ValueEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import CriticUpdatePlan, StepPlan, UpdatePlan
from posttrain.records.statistics import ForwardBackwardStats, LossStats, UpdateStats
from posttrain.steps.mini_batches import is_drawn, with_choice, with_high_entropy, with_proximal_share
from posttrain.steps.updates import OnSequences, run_mini_batches


def update_models(
    policy: TrainEngine, critic: ValueEngine | None, batch: TrainBatch, plan: StepPlan, clock: PhaseClock
) -> UpdateStats:
    """Update the critic, if there is one, and then the policy, except in steps in which only the critic warms up."""
    policy_stats = critic_stats = None
    if critic and plan.critic_update:
        with clock.phase("critic_update", total=len(batch) * plan.critic_update.epochs):
            # V towards R
            critic_stats = update_critic(critic, batch, plan.critic_update, clock.advance)
    if plan.updates_policy:
        with clock.phase("update", total=len(batch) * plan.update.epochs):
            policy_stats = update(policy, batch, plan.update, clock.advance)
    return merged(batch, policy_stats, critic_stats)


def update(
    policy: TrainEngine, batch: TrainBatch, plan: UpdatePlan, on_sequences: OnSequences | None = None
) -> UpdateStats:
    """Update the policy: plan.epochs passes over the batch, an optimizer step per mini-batch."""
    if isinstance(policy, MakesUpdates) and not plan.chooses_tokens:
        stats = policy.make_updates(batch, plan, on_sequences)
    else:
        stats = policy_updates(policy, batch, plan, on_sequences)
    known = batch.logprobs.old is not None or is_drawn(batch, plan)
    return replace(stats, trainer_logprobs=batch.logprobs.old) if known else stats


def policy_updates(
    policy: TrainEngine, batch: TrainBatch, plan: UpdatePlan, on_sequences: OnSequences | None = None
) -> UpdateStats:
    """Make the updates of the policy, with the log-probs of the first mini-batch as those of the trainer."""
    first_logprobs: list[Tensor] = []
    interpolated = plan.correction.interpolated
    start = policy.version if interpolated else 0

    def learn(mini_batch: TrainBatch, epoch: int) -> ForwardBackwardStats:
        chosen = with_high_entropy(mini_batch, plan.loss.high_entropy_share)
        chosen = with_choice(chosen, policy, plan.loss)
        if interpolated:
            chosen = with_proximal_share(chosen, proximal=start, policy=policy.version)
        stats = policy.forward_backward(chosen, plan.loss, mini_batch.counts())
        if not first_logprobs:
            first_logprobs.append(stats.policy_logprobs)
        return stats

    stats = run_mini_batches(policy, learn, batch, "policy", plan, on_sequences)
    return replace(stats, trainer_logprobs=first_logprobs[0])


def update_critic(
    critic: ValueEngine, batch: TrainBatch, plan: CriticUpdatePlan, on_sequences: OnSequences | None = None
) -> UpdateStats:
    """Update the critic on the value loss, in the same way: its values move towards the returns."""
    if isinstance(critic, MakesUpdates):
        return critic.make_updates(batch, plan, on_sequences)
    return critic_updates(critic, batch, plan, on_sequences)


def critic_updates(
    critic: ValueEngine, batch: TrainBatch, plan: CriticUpdatePlan, on_sequences: OnSequences | None = None
) -> UpdateStats:
    """Make the updates of the critic."""

    def learn(mini_batch: TrainBatch, epoch: int) -> LossStats:
        return critic.forward_backward(mini_batch, plan.loss, mini_batch.counts())

    return run_mini_batches(critic, learn, batch, "critic", plan, on_sequences)


def merged(batch: TrainBatch, policy: UpdateStats | None, critic: UpdateStats | None) -> UpdateStats:
    """One step's updates of all models as one; None stands for a model that was not to be updated in this step.

    ``updates`` is the number that the model with fewer of them made, so a step in which the policy or the critic could not
    learn at all counts as one without an update; a warm-up step, in which only the critic is due, does not.
    """
    due = [stats for stats in (policy, critic) if stats is not None]
    return UpdateStats(
        metrics={name: value for stats in due for name, value in stats.metrics.items()},
        trainer_logprobs=policy.trainer_logprobs if policy else batch.logprobs.old,
        updates=min(stats.updates for stats in due),
        skipped_updates=sum(stats.skipped_updates for stats in due),
    )
