"""Draw the responses of a step again before its updates: by their scores, or until they divide into updates."""

from __future__ import annotations

from dataclasses import replace

import torch

from posttrain.algos.resampling import draw_weights
from posttrain.config.fitting import Fit, fitted_count
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import ResamplingPlan
from posttrain.records.statistics import UpdateStats


def resample(train: TrainBatch, valid: torch.Tensor, plan: ResamplingPlan, seed: int) -> TrainBatch:
    """The rows that the updates of a step are made on: drawn by the scores of their responses, then made to divide into updates.

    Args: valid [B] bool, the response has a score; seed of the step. Unchanged where the plan has neither, or nothing to do.
    """
    return fitted(drawn_by_score(train, valid, plan, seed), plan, seed)


def fitted(train: TrainBatch, plan: ResamplingPlan, seed: int) -> TrainBatch:
    """Copy rows, or leave some out, until their number is plan.multiple_of times a whole number. Each row counts as a trajectory
    of its own then, so that updates have as many rows as they say. Copies come behind the others, no row is copied twice unless
    there are fewer rows than copies, and what is left keeps its order.

    Source: ROLL, batch_adjust_mode.
    """
    if plan.fit == "none":
        return train
    rows = fitted_rows(len(train), plan.multiple_of, plan.fit, seed)
    taken = train.rows(rows)
    return replace(taken, sequences=replace(taken.sequences, trajectory_index=torch.arange(len(rows))))


def fitted_rows(count: int, multiple: int, fit: Fit, seed: int) -> list[int]:
    """The numbers of the rows that stay, and of those that are copied; how many there are is ``fitted_count``."""
    wanted = fitted_count(count, multiple, fit)
    generator = torch.Generator().manual_seed(seed)
    if wanted <= count:
        chosen: list[int] = torch.randperm(count, generator=generator)[:wanted].sort().values.tolist()
        return chosen
    copies = wanted - count
    if copies <= count:
        again = torch.randperm(count, generator=generator)[:copies]
    else:
        again = torch.randint(count, (copies,), generator=generator)
    return [*range(count), *again.tolist()]


def drawn_by_score(train: TrainBatch, valid: torch.Tensor, plan: ResamplingPlan, seed: int) -> TrainBatch:
    """Draw as many responses as the step has, with replacement; one that is drawn twice is learned from twice. Rows of a
    trajectory stay together. Unchanged without weights, or where no response is valid.
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
    its responses that was drawn and the rows that were added or left out are metrics."""
    if drawn is train:
        return stats
    share = len(set(drawn.sequences.sample_ids)) / len(set(train.sequences.sample_ids))
    metrics = {**stats.metrics, "policy/drawn_share": share, "policy/added_samples": float(len(drawn) - len(train))}
    return replace(stats, trainer_logprobs=train.logprobs.old, metrics=metrics)
