"""Passes over one step's sequences with an optimizer step per mini-batch: what policy and critic have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from posttrain.interfaces.train_engine import OptimizedEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.statistics import LossStats


def run_mini_batches(
    engine: OptimizedEngine,
    learn: Callable[[TrainBatch, int], LossStats],
    batch: TrainBatch,
    *,
    role: str,
    epochs: int,
    sequences_per_update: int,
    on_sequences: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], int, int]:
    """``epochs`` passes over the batch. ``learn(mini_batch, epoch)`` adds the gradient, then comes the optimizer step.

    A mini-batch whose loss or gradient is not finite, or that holds no token to learn from, changes nothing and is counted.

    Returns: metrics by name, updates made, updates skipped. Metrics are means over all loss tokens; ROLE/loss,
        ROLE/grad_norm and ROLE/lr are means over the updates made, and absent when there were none.
    """
    sums, norms, rates, losses = Counter[str](), [], [], []
    tokens = skipped = 0
    for epoch in range(epochs):
        for rows in rows_per_update(batch, sequences_per_update):
            stats = learn(batch.rows(rows), epoch)
            if on_sequences:
                on_sequences(len(rows))
            if stats.tokens == 0 or not math.isfinite(stats.loss):
                engine.zero_grad()
                skipped += 1
                continue
            step = engine.optimizer_step()
            if step.skipped:
                skipped += 1
                continue
            sums.update(stats.sums)
            tokens += stats.tokens
            losses.append(stats.loss)
            norms.append(step.grad_norm)
            rates.append(step.lr)
    metrics = {name: total / tokens for name, total in sums.items()} if tokens else {}
    if losses:
        metrics |= {f"{role}/loss": _mean(losses), f"{role}/grad_norm": _mean(norms), f"{role}/lr": _mean(rates)}
    metrics[f"{role}/skipped_updates"] = float(skipped)
    return metrics, len(losses), skipped


def rows_per_update(batch: TrainBatch, sequences_per_update: int) -> list[list[int]]:
    """The rows of each mini-batch. Trajectories are what is counted, so that a step has as many updates as its plan says, into
    however many rows its episodes were cut; all rows of a trajectory are in one mini-batch."""
    _, number = batch.sequences.trajectories.unique_consecutive(return_inverse=True)
    found: dict[int, list[int]] = {}
    for row, update in enumerate((number // sequences_per_update).tolist()):
        found.setdefault(update, []).append(row)
    return list(found.values())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
