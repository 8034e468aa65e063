"""Draw the responses of a step again, by their scores, before its updates."""

from __future__ import annotations

from dataclasses import replace

import torch

from posttrain.algos.resampling import draw_weights
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import ResamplingPlan
from posttrain.records.statistics import UpdateStats


def resample(train: TrainBatch, valid: torch.Tensor, plan: ResamplingPlan, seed: int) -> TrainBatch:
    """Draw as many responses as the step has, with replacement; one that is drawn twice is learned from twice. Rows of a
    trajectory stay together. Unchanged without weights, or where no response is valid.

    Args: valid [B] bool, the response has a score; seed of the step.
    """
    if plan.weights == "none" or not valid.any():
        return train
    sequences = train.sequences
    _, sizes = sequences.trajectory_index.unique_consecutive(return_counts=True)
    starts = sizes.cumsum(0) - sizes
    last = sequences.last_rows
    chances = draw_weights(train.scores[last], valid[last], weights=plan.weights, exponent=plan.exponent)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(chances, len(chances), replacement=True, generator=generator).tolist()
    rows = [row for one in drawn for row in range(int(starts[one]), int(starts[one] + sizes[one]))]
    # A response drawn twice in a row is two trajectories.
    numbers = torch.arange(len(drawn)).repeat_interleave(sizes[drawn])
    taken = train.rows(rows)
    return replace(taken, sequences=replace(taken.sequences, trajectory_index=numbers))


def stats_of_all(stats: UpdateStats, train: TrainBatch, drawn: TrainBatch) -> UpdateStats:
    """The statistics of updates on drawn responses, for records of the whole step: log-probs are of its rows, and the share of
    its responses that was drawn is added."""
    if drawn is train:
        return stats
    share = len(set(drawn.sequences.sample_ids)) / len(set(train.sequences.sample_ids))
    metrics = {**stats.metrics, "policy/drawn_share": share}
    return replace(stats, trainer_logprobs=train.logprobs.old, metrics=metrics)
