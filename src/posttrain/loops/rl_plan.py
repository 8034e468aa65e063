"""What a run of reinforcement learning is told to do: in every step, and besides its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.records.plans import (
    AdvantagePlan,
    CriticUpdatePlan,
    GroupFilterPlan,
    ProfilePlan,
    RewardPlan,
    UpdatePlan,
)
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every step does."""

    prompts: int  # groups that make up a step
    sampling: SamplingParams
    group_filter: GroupFilterPlan = field(default_factory=GroupFilterPlan)
    reward: RewardPlan = field(default_factory=RewardPlan)
    mask_truncated: bool = False  # responses cut at the token limit have no part in the loss
    advantage: AdvantagePlan
    update: UpdatePlan
    critic_update: CriticUpdatePlan | None = None  # None: there is no critic
    updates_policy: bool = True  # False in the steps in which only the critic warms up
    max_invalid_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the run does besides its steps, and when. Cadences in steps; None is never."""

    step: StepPlan
    seed: int
    validation_sampling: SamplingParams
    validation_prompts: Sequence[Prompt]
    total_steps: int
    steps_per_epoch: int
    max_skipped_steps: int
    validate_every: int | None
    validate_before: bool
    validate_after: bool
    save_every: int | None
    save_at_end: bool
    save_in_background: bool = False  # while the next step samples
    export_every: int | None = None  # plain Hugging Face folders, also at the end
    export_folder: Path | None = None
    validation_logprobs: bool = False  # the trainer scores what is shown of a validation token by token
    samples_every: int | None
    batches_every: int | None = None
    critic_warmup_steps: int = 0  # steps at the start in which the policy is not updated
    profile: ProfilePlan = field(default_factory=ProfilePlan)

    def step_plan(self, step: int) -> StepPlan:
        """The plan of one step: its sampling has a seed of its own, so a prompt drawn again gets other random numbers; the
        policy stays as it is while the critic warms up."""
        return replace(
            self.step,
            sampling=replace(self.step.sampling, seed=mixed_seed(self.seed, step)),
            updates_policy=step > self.critic_warmup_steps,
        )


def mixed_seed(seed: int, number: int) -> int:
    """A seed made of two numbers, far from those of their neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")
