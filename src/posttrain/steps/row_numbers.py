"""Numbers of the rows of a step that its metrics and samples are made of, in one call of the processes that hold the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.algos.statistics import returns_and_errors
from posttrain.interfaces.row_work import RowWork
from posttrain.records.batches import TrainBatch
from posttrain.records.computed_tensors import RowQuestion, of_each_row_together
from posttrain.records.span_tensors import SpanTensor, first_values, row_counts
from posttrain.records.statistics import UpdateStats

GAP_THRESHOLD = 0.1  # nats


class RowNumbers(NamedTuple):
    """Tables of rows; None where a step has no such numbers, or they are computed where they are needed."""

    advantages: Tensor | None = None  # [B, 4], ``sums_and_ends``
    critic: Tensor | None = None  # [B, 10], ``returns_and_errors``
    gaps: Tensor | None = None  # [n, 4], ``gaps_of_rows`` of the rows whose log-probs the trainer has computed
    first_advantages: Tensor | None = None  # [B, 1], ``first_values``
    correction: Tensor | None = None  # [B, 4], ``sums_of_weights`` of rollout correction


def numbers_of_rows(batch: TrainBatch, update: UpdateStats, over_rows: RowWork | None = None) -> RowNumbers:
    """Ask for all of them at once. Args: over_rows, None: as ``of_each_row``."""
    sequences, mask, logprobs = batch.sequences, batch.loss_mask, update.trainer_logprobs
    asked: dict[str, RowQuestion] = {}
    learns = bool(row_counts(mask).any())
    if learns and not (isinstance(batch.advantages, SpanTensor) and isinstance(mask, SpanTensor)):
        asked["advantages"] = sums_and_ends, (batch.advantages, mask)
    if learns and batch.critic is not None:
        asked["critic"] = returns_and_errors, (batch.critic.values, batch.critic.returns, mask)
    if logprobs is not None:
        rows = slice(len(logprobs)) if len(logprobs) < len(batch) else slice(None)
        asked["gaps"] = gaps_of_rows, (sequences.rollout_logprobs[rows], logprobs, sequences.response_mask[rows])
    if batch.logprobs.importance_weights is not None:
        asked["correction"] = sums_of_weights, (batch.logprobs.importance_weights, sequences.response_mask)
    asked["first_advantages"] = first_values, (batch.advantages, sequences.response_mask)
    return RowNumbers(**dict(zip(asked, of_each_row_together(list(asked.values()), over_rows), strict=True)))


def sums_and_ends(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row, of its sizes, the largest and the smallest value, [B, 4] float64."""
    kept = torch.where(mask, values, 0.0)
    return torch.stack(
        [
            kept.sum(dim=1, dtype=torch.float64),
            kept.abs().sum(dim=1, dtype=torch.float64),
            torch.where(mask, values, -torch.inf).amax(dim=1).double(),
            torch.where(mask, values, torch.inf).amin(dim=1).double(),
        ],
        dim=1,
    )


def gaps_of_rows(rollout_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of each row, add up their gaps, count those above the threshold, and find the largest, [B, 4] float64."""
    gaps = torch.where(mask, (rollout_logprobs - trainer_logprobs).abs(), 0.0)
    above = (gaps > GAP_THRESHOLD).sum(dim=1)
    return torch.stack(
        [mask.sum(dim=1).double(), gaps.sum(dim=1, dtype=torch.float64), above.double(), gaps.amax(dim=1).double()],
        dim=1,
    )


def sums_of_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of each row, add up their weights and the squares of these, and find the largest, [B, 4] float64."""
    kept = torch.where(mask, weights, 0.0).double()
    return torch.stack([mask.sum(dim=1).double(), kept.sum(dim=1), kept.square().sum(dim=1), kept.amax(dim=1)], dim=1)
