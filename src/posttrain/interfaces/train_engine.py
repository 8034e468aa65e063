"""Models that can be scored and updated. Stages talk to these and never learn what is behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import LossPlan, ValueLossPlan
from posttrain.records.statistics import ForwardBackwardStats, LossStats, OptimizerStats


class ScoringEngine(Protocol):
    """A model that gives log-probs (the reference, and every policy)."""

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs of the response tokens, [B, T] float32 nats, 0 where response_mask is False. No gradient."""
        ...

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Sum of the squared probabilities of the whole vocabulary at every response token, [B, T] float32 in (0, 1], 0 where
        response_mask is False. No gradient."""
        ...


class OptimizedEngine(Protocol):
    """A model with an optimizer, whatever it learns."""

    @property
    def note(self) -> str | None:
        """What people should know about how this model is computed; None when there is nothing."""
        ...

    @property
    def version(self) -> int:
        """Updates made so far."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """Clip, update the weights, clear the gradients. A gradient that is not finite is dropped and said so."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients held."""
        ...

    def saved_bytes(self) -> int:
        """About how many bytes ``save`` will write; for a look at the disk before."""
        ...

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write weights (a Hugging Face folder), counters and, unless told otherwise, the optimizer's averages into an
        existing, empty folder."""
        ...

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        """``save`` in two parts, the second of which is the function returned: it may run in another thread, beside anything
        that leaves the weights as they are, and must be done before they change. How much is left to it is the engine's
        choice; what needs every process, or a device that others use, is done here.

        With ``sharded`` every process writes its own part of weights and averages (models.chunks) instead of all being
        gathered, unless an adapter is trained; ``load`` reads either, whatever the number of processes.
        """
        ...

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        """Take back what ``save`` wrote. Without ``optimizer`` its averages start anew; without ``schedule`` the count of
        updates does, which the learning rate follows."""
        ...


class TrainEngine(ScoringEngine, OptimizedEngine, Protocol):
    """The policy."""

    def forward_backward(self, batch: TrainBatch, loss: LossPlan, counts: LossCounts) -> ForwardBackwardStats:
        """Add the gradient of ``loss`` over these rows, divided by ``counts``, to the gradients held.

        The engine cuts its own micro-batches: it knows its memory.
        """
        ...


class ValueEngine(OptimizedEngine, Protocol):
    """The critic."""

    def values(self, batch: SequenceBatch) -> Tensor:
        """What the rest of each response is expected to be worth, [B, T] float32 reward units; 0 where response_mask is False.
        The value at a response token is of the text before it: the head's output at the token before. No gradient."""
        ...

    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:
        """Add the gradient of the value loss over these rows (which have values and returns), divided by ``counts``, to the
        gradients held. The engine cuts its own micro-batches."""
        ...
