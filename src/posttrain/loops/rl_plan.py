"""The plan of a reinforcement-learning run: its steps, and everything besides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from posttrain.loops.training import LoopPlan
from posttrain.records.plans import CriticUpdatePlan, StepPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, mixed_seed
from posttrain.run.step_ends import due

P = TypeVar("P", UpdatePlan, CriticUpdatePlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlan:
    """Sampling ahead of training."""

    mode: Literal["one_step", "colocate", "separate"]
    staleness_steps: float
    on_stale: Literal["wait", "drop"] = "wait"
    max_running_groups: int | None = None  # None: as many as may be admitted
    in_thread: bool = False  # one_step: the sampler works while the trainer does
    sync_between_tokens: bool = True  # separate: responses continue under new weights
    sync_every_steps: int = 1  # separate: the samplers get new weights after every so many steps
    wait_timeout_s: float = 3600.0
    prepared_groups: int = 0  # colocate: groups whose environments start before their admission
    keeps_cache: bool = False  # colocate: unfinished responses continue on the keys and values of older weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The steps of a run, and what happens besides them. Cadences in steps; None is never."""

    step: StepPlan
    loop: LoopPlan
    seed: int
    validation_sampling: SamplingParams
    validation_prompts: Sequence[Prompt]
    samples_every: int | None
    batches_every: int | None = None
    validation_logprobs: bool = False  # the trainer scores the validation samples that are shown, token by token
    asynchronous: AsyncPlan | None = None  # None: a step samples what it trains on
    critic_warmup_steps: int = 0  # steps at the start in which the policy is not updated
    reference_every: int | Literal["epoch"] | None = None  # steps, or after every epoch; None: the reference is frozen
    reference_mix: float = 1.0  # share of the policy in the reference when it moves

    def reference_moves(self, step: int, epochs_before: float, epochs_after: float) -> bool:
        """Tell whether the reference moves after a step, which began and ended with so many passes over the data."""
        if self.reference_every == "epoch":
            return int(epochs_after) > int(epochs_before)
        return due(step, self.reference_every)

    def step_plan(self, step: int) -> StepPlan:
        """The plan of one step: its sampling has a seed of its own, so a prompt drawn again gets other random numbers; the
        policy stays as it is while the critic warms up."""
        critic = self.step.critic_update
        return replace(
            self.step,
            sampling=replace(self.step.sampling, seed=mixed_seed(self.seed, step), step=step),
            update=_drawn_for(self.step.update, step),
            critic_update=critic and _drawn_for(critic, step),
            updates_policy=step > self.critic_warmup_steps,
        )


def _drawn_for(plan: P, step: int) -> P:
    """The updates of a step: where mini-batches are drawn, every step has draws of its own."""
    if plan.shuffle_seed is None:
        return plan
    return replace(plan, shuffle_seed=mixed_seed(plan.shuffle_seed, step))
