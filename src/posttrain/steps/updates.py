"""The optimizer steps of one step of a run, counted and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from posttrain.interfaces.train_engine import OptimizedEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import CriticUpdatePlan, OneUpdate, UpdatePlan
from posttrain.records.statistics import LossStats, OptimizerStats, UpdateStats
from posttrain.steps.mini_batches import rows_per_update

OnSequences = Callable[[int], None]  # called with the number of sequences that were learned since the last call


class Updates:
    """The updates that one step of a run makes of one model. Args: ``role`` begins the names of the metrics (policy, critic)."""

    def __init__(self, engine: OptimizedEngine, role: str):
        self._engine, self._role = engine, role
        self._sums = Counter[str]()
        self._losses: list[float] = []
        self._made: list[OptimizerStats] = []
        self._scales: list[float] = []
        self._tokens = self._skipped = 0
        engine.begin_step()

    def step(self, *passes: LossStats) -> OptimizerStats | None:
        """Make an optimizer step with the gradient of these passes. A pass whose loss is not finite or that holds no token to
        learn from, or a gradient that is not finite, changes nothing and is counted. Returns: None without a usable loss."""
        if any(stats.tokens == 0 or not math.isfinite(stats.loss) for stats in passes):
            self._engine.zero_grad()
            self._skipped += 1
            return None
        made = self._engine.optimizer_step()
        self._scales += [] if made.loss_scale is None else [made.loss_scale]
        if made.skipped:
            self._skipped += 1
            return made
        for stats in passes:
            self._sums.update(stats.sums)
            self._tokens += stats.tokens
        self._losses.append(sum(stats.loss for stats in passes))
        self._made.append(made)
        return made

    def stats(self) -> UpdateStats:
        """Return the updates made and skipped, and metrics by name: means over all loss tokens; ROLE/loss, ROLE/grad_norm and
        ROLE/lr are means over the updates made, and absent when there were none."""
        role = self._role
        metrics = {name: total / self._tokens for name, total in self._sums.items()} if self._tokens else {}
        if self._made:
            norms, rates = [made.grad_norm for made in self._made], [made.lr for made in self._made]
            metrics |= {
                f"{role}/loss": _mean(self._losses),
                f"{role}/grad_norm": _mean(norms),
                f"{role}/lr": _mean(rates),
            }
        metrics[f"{role}/skipped_updates"] = float(self._skipped)
        if self._scales:
            metrics[f"{role}/loss_scale"] = self._scales[-1]
        return UpdateStats(
            metrics=metrics, trainer_logprobs=None, updates=len(self._made), skipped_updates=self._skipped
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run_mini_batches(
    engine: OptimizedEngine,
    learn: Callable[[TrainBatch, int], LossStats],
    batch: TrainBatch,
    role: str,
    plan: UpdatePlan | CriticUpdatePlan | OneUpdate,
    on_sequences: OnSequences | None = None,
) -> UpdateStats:
    """The plan's passes over the batch. ``learn(mini_batch, epoch)`` adds the gradient, then comes the optimizer step.

    A mini-batch whose loss or gradient is not finite, or that holds no token to learn from, changes nothing and is counted.
    """
    made = Updates(engine, role)
    for epoch in range(plan.epochs):
        for rows in rows_per_update(batch, plan, epoch):
            stats = learn(batch.rows(rows), epoch)
            if on_sequences:
                on_sequences(len(rows))
            made.step(stats)
    return made.stats()
