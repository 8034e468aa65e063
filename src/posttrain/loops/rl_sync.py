"""Synchronous reinforcement learning: sample, score, update, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import RunPlan, StepPlan, mixed_seed
from posttrain.loops.validation import most_tokens, validate
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.statistics import UpdateStats
from posttrain.records.trajectories import ScoredGroup
from posttrain.run.batch_files import batch_path, save_step
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.clock import Clock
from posttrain.run.exports import export_models
from posttrain.run.health import Health
from posttrain.run.profile import Profiler
from posttrain.run.samples import write_samples
from posttrain.run.step_ends import before_updates, due, end_step, leave_step
from posttrain.run.stopping import StepAbandoned, StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.token_values import TokenTexts
from posttrain.run.trackers import Trackers
from posttrain.steps.advantage import estimate_advantages, inputs_of
from posttrain.steps.assemble import assemble
from posttrain.steps.baseline import add_greedy_rewards
from posttrain.steps.collect import collect
from posttrain.steps.logprobs import add_logprobs, add_sum_pi_squared
from posttrain.steps.measure import measure, staleness_metrics
from posttrain.steps.score import TooManyInvalid, score
from posttrain.steps.select import Selection
from posttrain.steps.shape_rewards import RewardState, shape_outcomes, shape_rewards
from posttrain.steps.update import merged, update, update_critic
from posttrain.steps.values import add_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step has sampled and learned."""

    selection: Selection  # groups, as sampled
    sampled: SequenceBatch  # the same, as a batch
    train: TrainBatch
    stats: UpdateStats


def rl_step(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    rewards: RewardState,
    plan: StepPlan,
    clock: Clock,
) -> Step:
    """One step of GRPO (arXiv:2402.03300, algorithm 1); with a critic, of PPO (arXiv:1707.06347, algorithm 1)."""
    selection = sample_groups(roles, scorer, loader, plan, clock)  # G responses per prompt, and r_i for each
    batch = assemble(selection.groups, mask_truncated=plan.mask_truncated)  # pad to [batch, response_len]
    if "greedy_rewards" in inputs_of(plan.advantage):
        prompts = [group.group.prompt for group in selection.groups]
        with clock.phase("baseline", total=most_tokens(roles, prompts, replace(plan.sampling, samples_per_prompt=1))):
            batch = add_greedy_rewards(  # r of the greedy response
                batch, roles, scorer, selection.groups, plan.sampling, plan.reward, clock.advance
            )
    train, stats = learn(roles, batch, rewards, plan, clock)
    return Step(selection=selection, sampled=batch, train=train, stats=stats)


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
    profiler = Profiler(plan.profile, folder, trackers.message, roles.profiler)
    health = Health()
    roles.weight_sync.publish(roles.policy, roles.rollout)
    metrics: dict[str, float] = {}
    if first_step == 1 and plan.validate_before and plan.validation_prompts:
        clock = Clock(trackers, 0, stop, timeline, profiler)
        try:
            metrics = validate(roles, scorer, plan, 0, folder, clock, token_texts) | scorer.take_costs()
            trackers.log(0, metrics | clock.metrics())
        except StepAbandoned:
            raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin") from None

    def save(number: int, background: bool = False) -> str:
        return checkpoints.save(number, roles.policy, loader, roles.critic, rewards, metrics, background=background)

    idle_steps = 0  # in a row, without an update
    for step in range(first_step, plan.total_steps + 1):
        clock = Clock(trackers, step, stop, timeline, profiler, before_updates(checkpoints, trackers, stop))
        last = step == plan.total_steps
        before, version = (loader.state(), rewards.state()), roles.policy.version
        try:
            done = rl_step(roles, scorer, loader, rewards, plan.step_plan(step), clock)
        except TooManyInvalid as error:  # the samples are what shows which part of the reward is broken
            write_samples(samples_path(folder, step), step, error.scored)
            raise
        except StepAbandoned:  # before its first update: prompts were drawn, and rewards may have been counted
            loader.restore(before[0])
            rewards.restore(before[1])
            leave_step(step, save, checkpoints, trackers, stop)
        for text in roles.notices.take():
            trackers.message(text)
        metrics = step_metrics(done, version, roles, clock, plan.step.update.epochs) | rewards.metrics
        metrics["progress/epoch"] = loader.epochs
        write_records(folder, step, done, plan, token_texts)
        idle_steps = 0 if done.stats.updates else idle_steps + 1
        gives_up = idle_steps >= plan.max_skipped_steps
        if not gives_up and (due(step, plan.validate_every) or (last and plan.validate_after)):
            metrics |= validate(roles, scorer, plan, step, folder, clock, token_texts)
        metrics |= scorer.take_costs()
        # Logged before it is saved: a resumed run drops the lines of steps that no checkpoint holds and writes them again.
        trackers.log(step, metrics | clock.metrics())
        if gives_up:
            raise RunStopped(no_update_message(idle_steps, step, done.train))
        for alarm in health.look(step, metrics, longest_first(done.selection.groups)):
            trackers.message(alarm)
        if plan.export_folder and (due(step, plan.export_every) or (last and plan.export_every)):
            trackers.message(f"exported {export_models(plan.export_folder, step, roles.policy, roles.critic)}")
        end_step(
            step,
            save,
            trackers,
            stop,
            save_due=due(step, plan.save_every) or (last and plan.save_at_end),
            last=last,
            background=plan.save_in_background,
            timeline=timeline,
        )


def step_metrics(done: Step, version: int, roles: Roles, clock: Clock, epochs: int) -> dict[str, float]:
    """What is measured of a step but its times; the policy was at ``version`` when it began."""
    groups, sent_bytes = done.selection.groups, roles.weight_sync.sent_bytes
    return {
        **measure(groups, done.train, done.stats),
        **staleness_metrics(groups, version),
        **clock.throughput(done.selection.sampled_tokens, done.train, roles.work, epochs),
        **done.selection.metrics(),
        **({"speed/weight_sync_mib": sent_bytes / 2**20} if sent_bytes else {}),
    }


def write_records(folder: Path, step: int, done: Step, plan: RunPlan, token_texts: TokenTexts) -> None:
    """Samples and tensors of a step, where they are due. A step that brought no update must be there to look at."""
    if due(step, plan.samples_every) or not done.stats.updates:
        write_samples(
            samples_path(folder, step),
            step,
            done.selection.groups,
            done.train,
            trainer_logprobs=done.stats.trainer_logprobs,
            token_texts=token_texts,
        )
    if due(step, plan.batches_every):
        save_step(batch_path(folder, step), done.sampled, done.train)


def samples_path(folder: Path, step: int) -> Path:
    return folder / "samples" / f"step_{step}.jsonl"


def longest_first(groups: Sequence[ScoredGroup]) -> list[str]:
    """The sample ids of a step, longest response first: those that show best what went wrong."""
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    return [one.sample_id for one in sorted(trajectories, key=lambda one: len(one.token_ids), reverse=True)]


def no_update_message(steps: int, step: int, train: TrainBatch) -> str:
    """Why a run that makes no updates ended, and where to look."""
    return (
        f"{steps} steps in a row made no update (step {step} was the last): losses or gradients were not finite, or no "
        f"response had a valid reward. Samples of the last step: {', '.join(train.sequences.sample_ids[:3])}, ... in "
        f"samples/step_{step}.jsonl"
    )
