"""Batches for tests: the fields that a test is about, and plain values for all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.batches import (
    CriticTargets,
    ScoredBatch,
    SequenceBatch,
    ShapedBatch,
    TrainBatch,
    TrainerLogprobs,
)
from posttrain.records.plans import AdvantagePlan, UpdatePlan
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.rl_step import trainer_logprobs


def sequence_batch(**given: Any) -> SequenceBatch:
    """Needs tokens, prompt_lengths and response_mask. By default every row is a group and a trajectory of its own."""
    rows = len(given["tokens"])
    plain = {
        "rollout_logprobs": torch.zeros(given["response_mask"].shape),
        "group_index": torch.arange(rows),
        "trajectory_index": torch.arange(rows),
        "sample_ids": tuple(map(str, range(rows))),
    }
    return SequenceBatch(**(plain | given))


def scored_batch(sequences: SequenceBatch, **given: Any) -> ScoredBatch:
    """By default every reward is a valid 0."""
    rows = len(sequences)
    plain = {
        "rewards": torch.zeros(rows),
        "valid": torch.ones(rows, dtype=torch.bool),
        "trained": torch.ones(rows, dtype=torch.bool),
    }
    return ScoredBatch(sequences=sequences, **(plain | given))


def shaped_batch(scored: ScoredBatch, logprobs: TrainerLogprobs | None = None, **given: Any) -> ShapedBatch:
    """By default the rewards are those that were scored."""
    plain = {"rewards": scored.rewards, "token_rewards": scored.turn_rewards}
    return ShapedBatch(scored=scored, logprobs=logprobs or TrainerLogprobs(), **(plain | given))


def train_batch(
    sequences: SequenceBatch,
    advantages: Tensor | None = None,
    loss_mask: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    values: Tensor | None = None,
    returns: Tensor | None = None,
    **logprobs: Any,
) -> TrainBatch:
    """By default all advantages are 0, and every sampled token is in the loss."""
    mask = sequences.response_mask
    return TrainBatch(
        sequences=sequences,
        scores=torch.zeros(len(sequences)) if scores is None else scores,
        logprobs=TrainerLogprobs(**logprobs),
        advantages=torch.zeros(mask.shape) if advantages is None else advantages,
        loss_mask=mask if loss_mask is None else loss_mask,
        critic=CriticTargets(values=values, returns=returns) if values is not None and returns is not None else None,
    )


def advantages_of(batch: ScoredBatch, plan: AdvantagePlan, values: Tensor | None = None, **logprobs: Any) -> TrainBatch:
    """The advantages of a scored batch whose rewards are not shaped."""
    return estimate_advantages(shaped_batch(batch, TrainerLogprobs(**logprobs)), values, plan)


def compared(
    batch: ScoredBatch, policy: ScoringEngine, reference: ScoringEngine | None, plan: UpdatePlan
) -> ShapedBatch:
    """The scored batch with log-probs of the policy and the reference, as the plan wants them; rewards are not shaped."""
    return shaped_batch(batch, trainer_logprobs(batch.sequences, policy, reference, plan))
