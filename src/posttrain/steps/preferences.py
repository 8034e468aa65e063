"""Preference tuning: one update on completions of which the better ones are known, and the same losses of held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from posttrain.algos.preferences import PreferenceValues, preference_values
from posttrain.data.preference_batches import mismatched, preference_batch, with_ref_logps
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.train_engine import OptimizedEngine, ScoreEngine, ScoringEngine, TrainEngine
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import OneUpdate, PreferencePlan
from posttrain.records.preferences import Preference
from posttrain.records.statistics import LossStats, UpdateStats
from posttrain.records.texts import Text
from posttrain.steps.updates import run_mini_batches

ROWS_AT_ONCE = 32  # handed to the engine together, which cuts its own micro-batches


class PreferenceModel(Protocol):
    """The model that is tuned, with what its method reads: log-probs of tokens, or a score behind the end."""

    @property
    def scored(self) -> bool:
        """True when a score head reads the row."""
        ...

    @property
    def engine(self) -> OptimizedEngine: ...

    def values(self, batch: SequenceBatch) -> Tensor:
        """Compute [B, T], without gradient."""
        ...

    def learn(self, batch: TrainBatch, plan: PreferencePlan) -> tuple[LossStats, Tensor]:
        """Add the gradient of the loss. Returns: its report, and the values [B, T] before the update."""
        ...


@dataclass(frozen=True, slots=True)
class LogprobModel:
    """A policy, whose log-probs of whole completions a method compares."""

    engine: TrainEngine
    scored: bool = False

    def values(self, batch: SequenceBatch) -> Tensor:
        return self.engine.logprobs(batch, 1.0)

    def learn(self, batch: TrainBatch, plan: PreferencePlan) -> tuple[LossStats, Tensor]:
        stats = self.engine.forward_backward(batch, plan, batch.counts())
        return stats, stats.policy_logprobs


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """A model with a head of one number, which scores completions: a reward model."""

    engine: ScoreEngine
    scored: bool = True

    def values(self, batch: SequenceBatch) -> Tensor:
        return self.engine.values(batch)

    def learn(self, batch: TrainBatch, plan: PreferencePlan) -> tuple[LossStats, Tensor]:
        stats = self.engine.forward_backward(batch, plan, batch.counts())
        return stats, stats.values


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceTask:
    """See interfaces.tuning.Task."""

    model: PreferenceModel
    plan: PreferencePlan
    reference: ScoringEngine | None  # None: the method has none, or the rows carry its log-probs
    needs_kl: bool  # the method compares with the KL of mismatched prompts and completions
    max_tokens: int  # of such a text

    def texts(self, rows: Sequence[Preference]) -> list[Text]:
        return [text for row in rows for text in row.sides]

    def step(self, rows: Sequence[Preference], clock: PhaseClock) -> UpdateStats:
        plan = self.plan
        batch = self._batch(rows, clock)
        if self.needs_kl:
            with clock.phase("kl"):
                plan = replace(plan, kl=max(0.0, self._mean_kl(rows)))
        seen: list[Tensor] = []

        def learn(mini_batch: TrainBatch, epoch: int) -> LossStats:
            stats, values = self.model.learn(mini_batch, plan)
            seen.append(values)
            return stats

        whole = OneUpdate(sequences_per_update=len(batch))
        with clock.phase("update", total=len(batch)):
            stats = run_mini_batches(self.model.engine, learn, batch, "policy", whole, clock.advance)
        found = preference_values(seen[0], batch, plan).means()
        found.pop("loss", None)  # policy/loss, computed with the gradient
        kl = {"kl": plan.kl} if self.needs_kl else {}
        return replace(stats, metrics={**stats.metrics, **found, **kl})

    def validate(self, rows: Sequence[Preference], clock: PhaseClock) -> dict[str, float]:
        """Compute the loss and the metrics of a step over all held-out rows; validation/accuracy is the share of pairs whose
        chosen side has the higher reward."""
        with clock.phase("validation_loss", total=len(rows)):
            plan = replace(self.plan, kl=max(0.0, self._mean_kl(rows))) if self.needs_kl else self.plan
            parts = []
            for start in range(0, len(rows), ROWS_AT_ONCE):
                part = rows[start : start + ROWS_AT_ONCE]
                batch = self._with_reference(preference_batch(part, scored=self.model.scored))
                parts.append(preference_values(self.model.values(batch.sequences), batch, plan))
                clock.advance(len(part))
        found = _joined(parts).means()
        if "rewards/accuracies" in found:
            found["accuracy"] = found.pop("rewards/accuracies")
        return {f"validation/{name}": value for name, value in found.items()}

    def _batch(self, rows: Sequence[Preference], clock: PhaseClock) -> TrainBatch:
        batch = preference_batch(rows, scored=self.model.scored)
        if self.reference is None:
            return batch
        with clock.phase("reference"):
            return self._with_reference(batch)

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        if self.reference is None:
            return batch
        return with_ref_logps(batch, reference_logps(self.reference, batch))

    def _mean_kl(self, rows: Sequence[Preference]) -> float:
        """Estimate KL(policy || reference), nats: the mean difference of log-probs on prompts with another one's completion."""
        assert self.reference is not None, "a KL needs a reference in the run"
        total = 0.0
        others = mismatched(rows, self.max_tokens)
        for start in range(0, len(others), ROWS_AT_ONCE):
            batch = preference_batch(others[start : start + ROWS_AT_ONCE])
            policy = completion_logps(self.model.values(batch.sequences), batch)
            total += float((policy - reference_logps(self.reference, batch)).sum())
        return total / len(others)


def reference_logps(reference: ScoringEngine, batch: TrainBatch) -> Tensor:
    """Compute the reference's log-prob of every completion, [B] float64 nats."""
    return completion_logps(reference.logprobs(batch.sequences, 1.0), batch)


def completion_logps(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """Sum the log-probs [B, T] of every completion, [B] float64 nats."""
    return torch.where(batch.loss_mask, logprobs.double(), 0.0).sum(dim=1)


def _joined(parts: Sequence[PreferenceValues]) -> PreferenceValues:
    names = parts[0].report
    return PreferenceValues(
        losses=torch.cat([part.losses for part in parts]),
        valid=torch.cat([part.valid for part in parts]),
        report={name: torch.cat([part.report[name] for part in parts]) for name in names},
    )
