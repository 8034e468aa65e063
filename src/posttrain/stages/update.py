"""Update the policy on one step's sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.interfaces.train_engine import TrainEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import UpdatePlan
from posttrain.records.statistics import UpdateStats


def update(
    policy: TrainEngine, batch: TrainBatch, plan: UpdatePlan, on_sequences: Callable[[int], None] | None = None
) -> UpdateStats:
    """plan.epochs passes over the batch, an optimizer step per mini-batch.

    A mini-batch whose loss or gradient is not finite, or that holds no token to learn from, changes nothing and is counted.
    Metrics are means over all loss tokens; gradient norm and learning rate are means over the updates made.
    """
    sums, norms, rates, losses = Counter[str](), [], [], []
    tokens = skipped = 0
    first_logprobs: list[Tensor] = []
    for epoch in range(plan.epochs):
        for start in range(0, len(batch), plan.sequences_per_update):
            rows = range(start, min(start + plan.sequences_per_update, len(batch)))
            mini_batch = batch.rows(list(rows))
            stats = policy.forward_backward(mini_batch, plan.loss, mini_batch.counts())
            if epoch == 0:
                first_logprobs.append(stats.policy_logprobs)
            if on_sequences:
                on_sequences(len(rows))
            if stats.tokens == 0 or not math.isfinite(stats.loss):
                policy.zero_grad()
                skipped += 1
                continue
            step = policy.optimizer_step()
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
        metrics |= {"policy/loss": _mean(losses), "policy/grad_norm": _mean(norms), "policy/lr": _mean(rates)}
    metrics["policy/skipped_updates"] = float(skipped)
    old = batch.sequences.old_logprobs
    return UpdateStats(
        metrics=metrics,
        trainer_logprobs=old if old is not None else torch.cat(first_logprobs),
        updates=len(losses),
        skipped_updates=skipped,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
