"""Plain values that tell a stage or an engine what to do; they cross process borders as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """The policy's loss: a name in POLICY_LOSSES with its keyword arguments, and plain numbers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str
    temperature: float  # divides the logits, as in sampling
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How many of what in a step. Prompts become sequences, sequences are cut into mini-batches (one update each), those
    into micro-batches (one forward and backward pass each, per device)."""

    devices: int
    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    epochs_per_step: int
    updates_per_step: int
    sequences_per_update: int
    sequences_per_micro_batch_per_device: int
    gradient_accumulation_steps: int
    steps_per_epoch: int | None  # None: the data was not looked at
    total_steps: int | None  # None: needs the data
    total_updates: int | None

    @property
    def on_policy(self) -> bool:
        """One update per step: the policy that is updated is the one that sampled, so old log-probs are its own."""
        return self.updates_per_step == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagePlan:
    """A name in ADVANTAGES with its keyword arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How a step's sequences become updates."""

    loss: LossPlan
    epochs: int
    sequences_per_update: int
    on_policy: bool  # one update per step: no old log-probs are needed
