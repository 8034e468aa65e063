"""Sizes of a step: how many prompts, sequences, updates and micro-batches. ``posttrain plan`` prints them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticBatchPlan:
    """The critic's own way of cutting a step's sequences."""

    epochs_per_step: int
    updates_per_step: int
    sequences_per_update: int
    sequences_per_micro_batch_per_device: int | None  # None: micro-batches are cut by tokens
    gradient_accumulation_steps: int | None  # None: depends on the lengths
    warmup_steps: int  # steps at the start in which the policy is not updated
    total_updates: int | None  # None: needs the data


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The sizes of a step. Prompts become sequences, sequences are cut into mini-batches (one update each), those
    into micro-batches (one forward and backward pass each, per device)."""

    devices: int
    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    # Once resampling.fit has made them divide; where samples are turns, at least so many; None: it changes none
    trained_samples_per_step: int | None = None
    epochs_per_step: int
    updates_per_step: int
    sequences_per_update: int
    sequences_per_micro_batch_per_device: int | None  # None: cut by tokens
    gradient_accumulation_steps: int | None  # micro-batches of an update; None: as many as their tokens need
    max_tokens_per_micro_batch: int | None = None  # of the policy, per device; None: cut by count
    steps_per_epoch: int | None  # None: the data was not looked at
    total_steps: int | None  # None: needs the data
    schedule_steps: int | None  # steps that learning rates are stretched over; None: needs the data
    total_updates: int | None  # of the policy
    critic: CriticBatchPlan | None = None  # None: the estimator needs no values
    # Sequences are turns, of which a step has as many as its episodes take: it makes updates_per_step at least
    counts_turns: bool = False

    @property
    def schedule_updates(self) -> int | None:
        """The updates of all steps, over which the policy's learning rate is planned. While the critic warms up the schedule
        waits with the policy, so it ends early then, as verl's and ROLL's do."""
        return self.schedule_steps * self.updates_per_step if self.schedule_steps is not None else None

    @property
    def on_policy(self) -> bool:
        """One update per step: the policy that is updated is the one that sampled, so old log-probs are its own."""
        return self.updates_per_step == 1 and not self.counts_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatchPlan:
    """The sizes of a run of supervised fine-tuning. A step is one update."""

    devices: int
    sequences_per_step: int
    sequences_per_micro_batch_per_device: int | None  # None: cut by tokens
    gradient_accumulation_steps: int | None  # micro-batches of an update; None: as many as their tokens need
    max_tokens_per_micro_batch: int | None = None  # per device; None: cut by count
    steps_per_epoch: int | None  # None: the data was not looked at
    total_steps: int | None  # None: needs the data
    schedule_updates: int | None  # updates that warm-up and decay are stretched over; None: needs the data

    @property
    def updates_per_step(self) -> int:
        return 1

    @property
    def sequences_per_update(self) -> int:
        return self.sequences_per_step
