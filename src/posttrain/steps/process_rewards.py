"""Train the process reward model on a step's scored responses, and reward their tokens by it (PRIME)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.algos.statistics import masked_mean
from posttrain.errors import RunStopped
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.roles import ProcessRewardModel
from posttrain.records.batches import ScoredBatch, TrainBatch, TrainerLogprobs
from posttrain.records.plans import OneUpdate, ProcessRewardPlan
from posttrain.records.statistics import ForwardBackwardStats
from posttrain.steps.updates import run_mini_batches

ROLE = "process_reward"  # begins its metrics, and names its folder in a checkpoint


@dataclass(frozen=True, slots=True)
class ProcessRewards:
    """The batch with rewards of tokens, and the metrics of the model that gave them."""

    scored: ScoredBatch
    metrics: dict[str, float]


def add_process_rewards(
    scored: ScoredBatch, model: ProcessRewardModel, plan: ProcessRewardPlan, clock: PhaseClock
) -> ProcessRewards:
    """Update the model as the plan says, and put process_rewards [B, T] into the batch's extras.

    Raises: RunStopped for a reward that is not from 0 to 1.
    """
    metrics: dict[str, float] = {}
    with clock.phase(ROLE):
        batch = _batch(scored, model.reference.logprobs(scored.sequences, plan.loss.temperature))
        logprobs = None
        if plan.update != "never":
            logprobs, metrics = _learn(batch, model, plan)
        if plan.update != "after" or logprobs is None:
            logprobs = model.engine.logprobs(scored.sequences, plan.loss.temperature)
    assert batch.logprobs.old is not None
    log_ratios = torch.where(batch.loss_mask, logprobs - batch.logprobs.old, 0.0)
    rewards = token_rewards(log_ratios, batch.loss_mask, scored.sequences.last_tokens, plan)
    metrics |= _measured(log_ratios, rewards, batch)
    return ProcessRewards(replace(scored, extras={**scored.extras, "process_rewards": rewards}), metrics)


def token_rewards(log_ratios: Tensor, mask: Tensor, last_tokens: Tensor, plan: ProcessRewardPlan) -> Tensor:
    """Rewards of tokens from their log-ratios: scaled, 0 on the last token of a response, where the outcome is rewarded, and
    normalised as in the plan.

    Args: log_ratios [B, T] nats; mask and last_tokens [B, T] bool.
    Returns: [B, T], 0 where mask is False.
    """
    rewards = torch.where(mask & ~last_tokens, plan.log_ratio_scale * log_ratios, 0.0)
    if plan.normalize:
        to_go = rewards.flip(1).cumsum(1).flip(1)
        rewards = rewards / (to_go.abs().max() + 1e-6)
    return rewards


def _batch(scored: ScoredBatch, reference: Tensor) -> TrainBatch:
    """The step as the model learns from it: the reference in the place of the old policy, every sampled token."""
    valid, mask = scored.valid, scored.sequences.response_mask
    wrong = scored.rewards[valid & ~((scored.rewards >= 0) & (scored.rewards <= 1))]
    if len(wrong):
        raise RunStopped(
            f"a response has the reward {float(wrong[0]):g}, and a process reward model learns from rewards from 0 (wrong) to 1 "
            "(right): change the reward terms and their weights, or remove reward.process"
        )
    return TrainBatch(
        sequences=scored.sequences,
        scores=torch.where(valid, scored.rewards, 0.0),
        logprobs=TrainerLogprobs(old=reference, ref=None),
        advantages=torch.zeros(mask.shape),
        loss_mask=mask & valid[:, None],
    )


def _learn(
    batch: TrainBatch, model: ProcessRewardModel, plan: ProcessRewardPlan
) -> tuple[Tensor | None, dict[str, float]]:
    """One pass over the step. Returns: log-probs [B, T] of the passes in which the model learned; and its metrics."""
    seen: list[Tensor] = []

    def learn(mini_batch: TrainBatch, epoch: int) -> ForwardBackwardStats:
        stats = model.engine.forward_backward(mini_batch, plan.loss, mini_batch.counts())
        seen.append(stats.policy_logprobs)
        return stats

    made = run_mini_batches(model.engine, learn, batch, ROLE, OneUpdate(sequences_per_update=plan.sequences_per_update))
    own = {name: value for name, value in made.metrics.items() if name.startswith(f"{ROLE}/")}
    return torch.cat(seen), own


def _measured(log_ratios: Tensor, rewards: Tensor, batch: TrainBatch) -> dict[str, float]:
    rows = batch.loss_mask.any(dim=1)
    if not rows.any():
        return {}
    summed = log_ratios.sum(dim=1)
    agrees = ((summed > 0) == (batch.scores > 0.5)).float()
    return {
        f"{ROLE}/log_ratio": float(masked_mean(summed, rows)),
        f"{ROLE}/reward": float(masked_mean(rewards.sum(dim=1), rows)),
        f"{ROLE}/accuracy": float(masked_mean(agrees, rows)),
    }
