"""Synchronous reinforcement learning: sample, score, update, repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.clock import Clock
from posttrain.loops.stopping import StopSignal
from posttrain.loops.trackers import Trackers
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import AdvantagePlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import UpdateStats
from posttrain.records.trajectories import SamplingParams, ScoredGroup
from posttrain.stages.advantage import estimate_advantages
from posttrain.stages.assemble import assemble
from posttrain.stages.checkpoint import Checkpoints
from posttrain.stages.collect import collect
from posttrain.stages.logprobs import add_logprobs
from posttrain.stages.measure import measure
from posttrain.stages.samples import write_samples
from posttrain.stages.score import TooManyInvalid, score
from posttrain.stages.update import update
from posttrain.stages.validate import validation_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every step does."""

    sampling: SamplingParams
    advantage: AdvantagePlan
    update: UpdatePlan
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
    samples_every: int | None

    def step_plan(self, step: int) -> StepPlan:
        """The plan of one step: its sampling has a seed of its own, so a prompt drawn again gets other random numbers."""
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed}/{step}".encode(), digest_size=8).digest(), "little")
        return replace(self.step, sampling=replace(self.step.sampling, seed=seed))


def rl_step(
    roles: Roles, scorer: GroupScorer, prompts: Sequence[Prompt], plan: StepPlan, clock: Clock
) -> tuple[list[ScoredGroup], TrainBatch, UpdateStats]:
    """One step of GRPO (arXiv:2402.03300, algorithm 1)."""
    with clock.phase("rollout", total=most_tokens(prompts, plan.sampling)):
        groups = collect(roles, prompts, plan.sampling, clock.advance)  # sample G responses per prompt from the policy
    with clock.phase("reward"):
        scored = score(groups, scorer, plan.max_invalid_share)  # r_i for every response
    batch = assemble(scored)  # pad to [batch, response_len]
    with clock.phase("logprobs"):
        batch = add_logprobs(batch, roles.policy, roles.reference, plan.update)  # log pi_old, log pi_ref
    train = estimate_advantages(batch, plan.advantage)  # A_i,t
    with clock.phase("update", total=len(train) * plan.update.epochs):
        stats = update(roles.policy, train, plan.update, clock.advance)  # K epochs of clipped mini-batch updates
    with clock.phase("weight_sync"):
        roles.weight_sync.publish(roles.policy, roles.rollout)  # sampler <- policy
    return scored, train, stats


def run(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    plan: RunPlan,
    *,
    first_step: int,
    folder: Path,
    checkpoints: Checkpoints,
    trackers: Trackers,
    stop: StopSignal,
) -> None:
    """Steps first_step to plan.total_steps, with validation, checkpoints and records at their cadences.

    Raises: RunStopped when steps in a row bring no update; RunInterrupted after saving, when a signal asked to stop.
    """
    roles.weight_sync.publish(roles.policy, roles.rollout)
    if first_step == 1 and plan.validate_before:
        clock = Clock(trackers, step=0)
        trackers.log(0, validate(roles, scorer, plan, 0, folder, clock) | clock.metrics())
        if stop.requested:
            raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin")
    skipped_in_a_row = 0
    for step in range(first_step, plan.total_steps + 1):
        clock = Clock(trackers, step)
        last = step == plan.total_steps
        try:
            groups, train, stats = rl_step(roles, scorer, loader.next(), plan.step_plan(step), clock)
        except TooManyInvalid as error:  # the samples are what shows which part of the reward is broken
            write_samples(folder / "samples" / f"step_{step}.jsonl", step, error.scored)
            raise
        metrics = measure(groups, train, stats) | clock.throughput(groups, train)
        metrics["progress/epoch"] = step / plan.steps_per_epoch
        if _due(step, plan.samples_every) or not stats.updates:  # a step that failed must be there to look at
            write_samples(folder / "samples" / f"step_{step}.jsonl", step, groups, train)
        skipped_in_a_row = 0 if stats.updates else skipped_in_a_row + 1
        if skipped_in_a_row >= plan.max_skipped_steps:
            trackers.log(step, metrics | clock.metrics())
            raise RunStopped(no_update_message(skipped_in_a_row, step, train))
        if _due(step, plan.validate_every) or (last and plan.validate_after):
            metrics |= validate(roles, scorer, plan, step, folder, clock)
        # Logged before it is saved: a resumed run drops the lines of steps that no checkpoint holds and writes them again.
        trackers.log(step, metrics | clock.metrics())
        stopping = stop.requested  # read once: a signal may come between the save and the end of the step
        if _due(step, plan.save_every) or (last and plan.save_at_end) or stopping:
            trackers.phase("checkpoint", step)
            saved = checkpoints.save(step, roles.policy, loader)
            trackers.message(f"saved {saved}")
        if stopping and not last:
            raise RunInterrupted(f"stopped by {stop.name} after step {step}, saved as {saved}; start it again to go on")


def validate(
    roles: Roles, scorer: GroupScorer, plan: RunPlan, step: int, folder: Path, clock: Clock
) -> dict[str, float]:
    """Sample and score the held-out prompts; every sample is written to validation/step_N.jsonl."""
    if not plan.validation_prompts:
        return {}
    prompts, sampling = plan.validation_prompts, plan.validation_sampling
    with clock.phase("validation", total=most_tokens(prompts, sampling)):
        groups = collect(roles, prompts, sampling, clock.advance)
        scored = score(groups, scorer)
    write_samples(folder / "validation" / f"step_{step}.jsonl", step, scored)
    return validation_metrics(scored)


def no_update_message(steps: int, step: int, train: TrainBatch) -> str:
    """Why a run that makes no updates ended, and where to look."""
    return (
        f"{steps} steps in a row made no update (step {step} was the last): losses or gradients were not finite, or no "
        f"response had a valid reward. Samples of the last step: {', '.join(train.sequences.sample_ids[:3])}, ... in "
        f"samples/step_{step}.jsonl"
    )


def most_tokens(prompts: Sequence[Prompt], sampling: SamplingParams) -> int:
    """Response tokens if every response were as long as allowed."""
    return len(prompts) * sampling.samples_per_prompt * sampling.max_response_tokens


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
