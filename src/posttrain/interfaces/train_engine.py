"""Interfaces of training engines: models that score and are updated. Steps know these only, not the engine behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from posttrain.records.batches import LossCounts, SequenceBatch, TeacherScores, TrainBatch
from posttrain.records.plans import (
    CriticUpdatePlan,
    DistillationPlan,
    LossPlan,
    PreferencePlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.statistics import ForwardBackwardStats, LossStats, OptimizerStats, UpdateStats, ValueStats


class ScoringEngine(Protocol):
    """A model that computes log-probs: the reference, and every policy."""

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs of the response tokens, [B, T] float32 nats, 0 where response_mask is False. No gradient."""
        ...

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Entropy of the distribution that every response token was drawn from, [B, T] float32 nats, 0 where response_mask is
        False. No gradient."""
        ...

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Sum of the squared probabilities over the vocabulary at every response token, [B, T] float32 in (0, 1], 0 where
        response_mask is False. No gradient."""
        ...


@runtime_checkable
class ScoresTogether(Protocol):
    """A policy whose processes have further models."""

    def logprobs_with(
        self, reference: ScoringEngine, batch: SequenceBatch, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the log-probs of both models in one call of these processes; None where the reference has processes of its
        own."""
        ...


class TeacherEngine(Protocol):
    """A model that students learn from: in this run, or in a server."""

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """See ScoringEngine."""
        ...

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        """The k most likely tokens at every response token, [B, T, 2, k] float32: ids, and log-probs in nats of the whole
        distribution; 0 where response_mask is False. No gradient."""
        ...


class OptimizedEngine(Protocol):
    """A model with an optimizer: the policy or the critic."""

    @property
    def note(self) -> str | None:
        """Message for the user when the model is computed in an unusual way; None otherwise."""
        ...

    @property
    def version(self) -> int:
        """Number of updates made."""
        ...

    def begin_step(self) -> None:
        """The updates of a step are about to be made: a learning rate that moves once per step moves."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """Clip the gradients, update the weights, clear the gradients. A non-finite gradient is dropped and reported."""
        ...

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        ...

    def saved_bytes(self) -> int:
        """Estimate the bytes that ``save`` writes, to check the free disk space first."""
        ...

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write weights (a Hugging Face folder), counters and, by default, the optimizer's averages into an existing, empty
        folder."""
        ...

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        """Begin a ``save`` and return the function that completes it. That function may run in another thread, concurrently
        with anything that leaves the weights unchanged, and must finish before they change. The engine chooses how much it
        leaves to that function; work that needs every process, or a shared device, is done before returning.

        With ``sharded`` every process writes its own part of weights and averages (models.chunks) instead of gathering them,
        unless an adapter is trained; ``load`` reads both forms, for any number of processes.
        """
        ...

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        """Load the output of ``save``. Without ``optimizer`` its averages start from zero; without ``schedule`` so does the count
        of updates, which the learning rate follows."""
        ...


class TrainEngine(ScoringEngine, OptimizedEngine, Protocol):
    """The policy, with its optimizer."""

    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """``logprobs``, and the experts that the tokens had while these were computed, [B, P + T, layers, chosen] int16, -1 for
        padding. In runs whose updates replay them (policy.routing_replay)."""
        ...

    def reference_kl(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """KL(policy || reference) over the vocabulary at every response token, [B, T] float32 nats, 0 where response_mask is
        False. No gradient. In runs whose reward holds that KL (reward.kl.estimator full)."""
        ...

    def divergence(self, batch: SequenceBatch, teachers: Mapping[str, TeacherScores], plan: DistillationPlan) -> Tensor:
        """The divergence from the teachers, over the vocabulary or their top k, at every response token, [B, T] float32 nats, 0
        where response_mask is False. No gradient."""
        ...

    def move_reference(self, mix: float) -> None:
        """Mix the policy's weights into the reference: reference <- mix x policy + (1 - mix) x reference. In runs whose reference
        moves (reference.update_every); ``save`` and ``load`` include it."""
        ...

    def forward_backward(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan, counts: LossCounts
    ) -> ForwardBackwardStats:
        """Add the gradient of ``loss`` over these rows, divided by ``counts``, to the accumulated gradients.

        The engine splits the rows into micro-batches that fit its memory.
        """
        ...


class ValueEngine(OptimizedEngine, Protocol):
    """The critic, with its optimizer."""

    def values(self, batch: SequenceBatch) -> Tensor:
        """Expected return of the rest of each response, [B, T] float32 reward units; 0 where response_mask is False.
        The value at a response token depends on the text before it: the head's output at the previous token. No gradient."""
        ...

    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:
        """Add the gradient of the value loss over these rows (which have values and returns), divided by ``counts``, to the
        accumulated gradients. The engine splits the rows into micro-batches."""
        ...


class ScoreEngine(OptimizedEngine, Protocol):
    """A reward model in training: a model with a head of one number, with its optimizer."""

    def values(self, batch: SequenceBatch) -> Tensor:
        """Compute scores, as ``ValueEngine.values``: behind the last token of a row it is the row's."""
        ...

    def forward_backward(self, batch: TrainBatch, loss: PreferencePlan, counts: LossCounts) -> ValueStats:
        """Add the gradient of a tuning method's loss of the scores, divided by ``counts``, to the accumulated gradients. The
        engine splits the rows into micro-batches, between pairs."""
        ...


@runtime_checkable
class MakesUpdates(Protocol):
    """A policy or critic in other processes, which go through the updates of a step on their own: it takes one message instead
    of two for every update."""

    def make_updates(
        self, batch: TrainBatch, plan: UpdatePlan | CriticUpdatePlan, on_sequences: Callable[[int], None] | None
    ) -> UpdateStats:
        """Make the updates of steps.update in every process. Args: on_sequences receives the number of sequences that were
        learned since its last call."""
        ...
