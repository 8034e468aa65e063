"""Synchronous reinforcement learning: sample, score, update, repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.clock import Clock
from posttrain.loops.frame import before_updates, due, end_step, leave_step
from posttrain.loops.stopping import StepAbandoned, StopSignal
from posttrain.loops.timeline import Timeline
from posttrain.loops.trackers import Trackers
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import (
    AdvantagePlan,
    CriticUpdatePlan,
    GroupFilterPlan,
    ProfilePlan,
    RewardPlan,
    UpdatePlan,
)
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import UpdateStats
from posttrain.records.trajectories import SamplingParams, ScoredGroup
from posttrain.stages.advantage import estimate_advantages, inputs_of
from posttrain.stages.assemble import assemble
from posttrain.stages.baseline import add_greedy_rewards
from posttrain.stages.batch_files import batch_path, save_step
from posttrain.stages.checkpoint import Checkpoints
from posttrain.stages.collect import collect
from posttrain.stages.exports import export_models
from posttrain.stages.health import Health
from posttrain.stages.logprobs import add_logprobs, add_sum_pi_squared
from posttrain.stages.measure import measure, staleness_metrics
from posttrain.stages.profile import Profiler
from posttrain.stages.samples import write_samples
from posttrain.stages.score import TooManyInvalid, score
from posttrain.stages.select import Selection
from posttrain.stages.shape_rewards import RewardState, shape_outcomes, shape_rewards
from posttrain.stages.token_values import TokenTexts
from posttrain.stages.update import merged, update, update_critic
from posttrain.stages.validate import validation_metrics
from posttrain.stages.values import add_values


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


def rl_step(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    rewards: RewardState,
    plan: StepPlan,
    clock: Clock,
) -> tuple[Selection, SequenceBatch, TrainBatch, UpdateStats]:
    """One step of GRPO (arXiv:2402.03300, algorithm 1); with a critic, of PPO (arXiv:1707.06347, algorithm 1): what was sampled,
    as groups and as a batch, and what was learned from it."""
    selection = sample_groups(roles, scorer, loader, plan, clock)  # G responses per prompt, and r_i for each
    batch = assemble(selection.groups, mask_truncated=plan.mask_truncated)  # pad to [batch, response_len]
    if "greedy_rewards" in inputs_of(plan.advantage):
        prompts = [group.group.prompt for group in selection.groups]
        with clock.phase("baseline", total=most_tokens(roles, prompts, replace(plan.sampling, samples_per_prompt=1))):
            batch = add_greedy_rewards(  # r of the greedy response
                batch, roles, scorer, selection.groups, plan.sampling, plan.reward, clock.advance
            )
    train, stats = learn(roles, batch, rewards, plan, clock)
    return selection, batch, train, stats


def learn(
    roles: Roles, batch: SequenceBatch, rewards: RewardState, plan: StepPlan, clock: Clock
) -> tuple[TrainBatch, UpdateStats]:
    """The part of a step that follows sampling and scoring: update the models on a batch, and hand the sampler the weights."""
    with clock.phase("logprobs"):
        batch = add_logprobs(batch, roles.policy, roles.reference, plan.update)  # log pi_old, log pi_ref
        if "sum_pi_squared" in inputs_of(plan.advantage):
            batch = add_sum_pi_squared(batch, roles.policy, plan.update.loss.temperature)
    batch = shape_rewards(batch, plan.reward, rewards)  # r_i normalised; r_i,t less the KL
    if roles.critic:
        with clock.phase("values"):
            batch = add_values(batch, roles.critic)  # V(s_i,t)
    train = estimate_advantages(batch, plan.advantage)  # A_i,t, and with a critic the returns R_i,t
    policy_stats = critic_stats = None
    if roles.critic and plan.critic_update:
        with clock.phase("critic_update", total=len(train) * plan.critic_update.epochs):
            critic_stats = update_critic(roles.critic, train, plan.critic_update, clock.advance)  # V towards R
    if plan.updates_policy:
        with clock.phase("update", total=len(train) * plan.update.epochs):
            policy_stats = update(roles.policy, train, plan.update, clock.advance)  # K epochs of clipped updates
    stats = merged(train, policy_stats, critic_stats)
    with clock.phase("weight_sync"):
        roles.weight_sync.publish(roles.policy, roles.rollout)  # sampler <- policy
    return train, stats


def sample_groups(roles: Roles, scorer: GroupScorer, loader: PromptLoader, plan: StepPlan, clock: Clock) -> Selection:
    """The groups of a step, sampled by the policy and scored; with a filter that refills, from as many batches of prompts as
    it takes (DAPO, arXiv:2503.14476, algorithm 1).

    Raises: RunStopped when the filter's limit of batches is reached.
    """
    selection = Selection(plan.group_filter, plan.prompts)
    while not selection.complete:
        prompts, sampling = loader.next(), plan.sampling
        if selection.batches:  # a small dataset may bring the same prompt again: it gets other random numbers
            sampling = replace(sampling, seed=mixed_seed(sampling.seed, selection.batches))
        with clock.phase("rollout", total=most_tokens(roles, prompts, sampling)):
            groups = collect(roles, prompts, sampling, clock.advance, scorer.begin)  # scored while others are sampled
        with clock.phase("reward"):
            scored = score(
                groups,
                scorer,
                plan.max_invalid_share,
                reward_model=roles.reward_model,
                model_weight=plan.reward.model_weight,
            )
            selection.add(shape_outcomes(scored, plan.reward))
    return selection


def run(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    plan: RunPlan,
    *,
    rewards: RewardState,
    first_step: int,
    folder: Path,
    checkpoints: Checkpoints,
    trackers: Trackers,
    stop: StopSignal,
    token_texts: TokenTexts,
) -> None:
    """Steps first_step to plan.total_steps, with validation, checkpoints and records at their cadences.

    Raises: RunStopped when steps in a row bring no update; RunInterrupted after saving, when a signal asked to stop.
    """
    timeline = Timeline(folder, first_step, trackers.message)
    profiler = Profiler(plan.profile, folder, trackers.message)
    roles.weight_sync.publish(roles.policy, roles.rollout)
    metrics: dict[str, float] = {}
    if first_step == 1 and plan.validate_before and plan.validation_prompts:
        clock = Clock(trackers, 0, stop, timeline, profiler)
        try:
            metrics = validate(roles, scorer, plan, 0, folder, clock) | scorer.take_costs()
            trackers.log(0, metrics | clock.metrics())
        except StepAbandoned:
            raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin") from None

    def save(number: int, background: bool = False) -> str:
        return checkpoints.save(number, roles.policy, loader, roles.critic, rewards, metrics, background=background)

    health = Health()
    skipped_in_a_row = 0
    for step in range(first_step, plan.total_steps + 1):
        clock = Clock(trackers, step, stop, timeline, profiler, before_updates(checkpoints, trackers, stop))
        last = step == plan.total_steps
        before, version = (loader.state(), rewards.state()), roles.policy.version
        try:
            selection, sampled, train, stats = rl_step(roles, scorer, loader, rewards, plan.step_plan(step), clock)
        except TooManyInvalid as error:  # the samples are what shows which part of the reward is broken
            write_samples(folder / "samples" / f"step_{step}.jsonl", step, error.scored)
            raise
        except StepAbandoned:  # before its first update: prompts were drawn, and rewards may have been counted
            loader.restore(before[0])
            rewards.restore(before[1])
            leave_step(step, save, checkpoints, trackers, stop)
        for text in roles.notices.take():
            trackers.message(text)
        groups = selection.groups
        speeds = clock.throughput(selection.sampled_tokens, train, roles.work, plan.step.update.epochs)
        metrics = measure(groups, train, stats) | staleness_metrics(groups, version) | speeds
        metrics |= selection.metrics() | rewards.metrics
        metrics["progress/epoch"] = loader.epochs
        if due(step, plan.samples_every) or not stats.updates:  # a step that failed must be there to look at
            write_samples(
                folder / "samples" / f"step_{step}.jsonl",
                step,
                groups,
                train,
                trainer_logprobs=stats.trainer_logprobs,
                token_texts=token_texts,
            )
        if due(step, plan.batches_every):
            save_step(batch_path(folder, step), sampled, train)
        skipped_in_a_row = 0 if stats.updates else skipped_in_a_row + 1
        if skipped_in_a_row >= plan.max_skipped_steps:
            metrics |= scorer.take_costs()
            trackers.log(step, metrics | clock.metrics())
            raise RunStopped(no_update_message(skipped_in_a_row, step, train))
        if due(step, plan.validate_every) or (last and plan.validate_after):
            metrics |= validate(roles, scorer, plan, step, folder, clock)
        metrics |= scorer.take_costs()
        # Logged before it is saved: a resumed run drops the lines of steps that no checkpoint holds and writes them again.
        trackers.log(step, metrics | clock.metrics())
        for alarm in health.look(step, metrics, longest_first(groups)):
            trackers.message(alarm)
        if plan.export_folder and (due(step, plan.export_every) or (last and plan.export_every)):
            trackers.message(f"exported {export_models(plan.export_folder, step, roles.policy, roles.critic)}")
        save_due = due(step, plan.save_every) or (last and plan.save_at_end)
        end_step(
            step,
            save,
            trackers,
            stop,
            save_due=save_due,
            last=last,
            background=plan.save_in_background,
            timeline=timeline,
        )


def longest_first(groups: Sequence[ScoredGroup]) -> list[str]:
    """The sample ids of a step, longest response first: those that show best what went wrong."""
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    return [one.sample_id for one in sorted(trajectories, key=lambda one: len(one.token_ids), reverse=True)]


def validate(
    roles: Roles, scorer: GroupScorer, plan: RunPlan, step: int, folder: Path, clock: Clock
) -> dict[str, float]:
    """Sample and score the held-out prompts; every sample is written to validation/step_N.jsonl."""
    if not plan.validation_prompts:
        return {}
    prompts, sampling = plan.validation_prompts, plan.validation_sampling
    with clock.phase("validation", total=most_tokens(roles, prompts, sampling)):
        groups = collect(roles, prompts, sampling, clock.advance, scorer.begin)
        scored = score(groups, scorer, reward_model=roles.reward_model, model_weight=plan.step.reward.model_weight)
    write_samples(folder / "validation" / f"step_{step}.jsonl", step, scored)
    return validation_metrics(scored)


def no_update_message(steps: int, step: int, train: TrainBatch) -> str:
    """Why a run that makes no updates ended, and where to look."""
    return (
        f"{steps} steps in a row made no update (step {step} was the last): losses or gradients were not finite, or no "
        f"response had a valid reward. Samples of the last step: {', '.join(train.sequences.sample_ids[:3])}, ... in "
        f"samples/step_{step}.jsonl"
    )


def mixed_seed(seed: int, number: int) -> int:
    """A seed made of two numbers, far from those of their neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")


def most_tokens(roles: Roles, prompts: Sequence[Prompt], sampling: SamplingParams) -> int | None:
    """Response tokens if every response were as long as allowed; None where turns are not counted."""
    turns = roles.worlds.rules.max_turns if roles.worlds else 1
    return None if turns is None else len(prompts) * sampling.samples_per_prompt * sampling.max_response_tokens * turns
