"""Synchronous reinforcement learning: sample, score, update, repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.interfaces.roles import Roles
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.loops.rl_plan import RunPlan
from posttrain.loops.rl_run import RlRun
from posttrain.loops.training import LoopBody, StepReport, run_steps
from posttrain.loops.validation import validate
from posttrain.records.computed_tensors import rows_computed_by
from posttrain.records.plans import StepPlan
from posttrain.records.trajectories import ScoredGroup
from posttrain.run.batch_files import batch_path, save_step
from posttrain.run.clock import Clock
from posttrain.run.health import NO_SIGNAL, WATCHED, Watched
from posttrain.run.samples import write_samples
from posttrain.run.step_ends import due
from posttrain.run.token_values import TokenTexts
from posttrain.steps.failures import counted, examples, failures_of
from posttrain.steps.measure import measure, staleness_metrics
from posttrain.steps.rl_step import AnySelection, StepResult, collect, sample_groups, train_on
from posttrain.steps.row_numbers import RowNumbers, numbers_of_rows
from posttrain.steps.score import TooManyInvalid


def run(parts: RlRun) -> None:
    """The steps of a run, one after the other, with what lies between them; see loops.training.run_steps."""

    def sample(number: int, step_plan: StepPlan, clock: Clock) -> AnySelection:
        kept = parts.responses.of_step(number, collect) if parts.responses else collect
        return sample_groups(parts.roles, parts.scorer, parts.loader, step_plan, clock, collected_by=kept)

    run_rl(parts, GroupSource(sample=sample))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSource:
    """The source of a step's groups: the only part in which synchronous and asynchronous loops differ."""

    sample: Callable[[int, StepPlan, Clock], AnySelection]
    before_sync: Callable[[], None] = lambda: None  # called before the sampler gets new weights
    sampled_tokens: Callable[[StepResult], int] = lambda done: (
        done.selection.sampled_tokens
    )  # in the step, for its speed
    # Called after the updates of a step; returns its metrics. The number is the version that the step began with.
    end_step: Callable[[StepResult, int], dict[str, float]] = lambda done, version: {}
    validating: Callable[[], AbstractContextManager[object]] = nullcontext  # around a validation
    epochs: Callable[[], float] | None = None  # passes over the data at the end of the step; None: the loader's


def run_rl(parts: RlRun, source: GroupSource) -> None:
    """The steps of a run whose groups come from ``source``."""
    roles, plan, folder = parts.roles, parts.plan, parts.run.folder

    def epochs() -> float:
        return source.epochs() if source.epochs else parts.loader.epochs

    def step(number: int, clock: Clock) -> StepReport:
        with rows_computed_by(roles.over_rows):
            return step_with(number, clock)

    def step_with(number: int, clock: Clock) -> StepReport:
        version, epochs_before = roles.policy.version, epochs()
        try:
            parts.scorer.at_step(number)
            step_plan = plan.step_plan(number)
            selection = source.sample(number, step_plan, clock)
            done = train_on(selection, roles, parts.scorer, parts.rewards, step_plan, clock, source.before_sync)
        except TooManyInvalid as error:  # the samples show which part of the reward is broken
            write_samples(samples_path(folder, number), number, error.scored)
            raise
        began = Began(number=number, version=version, epochs=epochs_before)
        report = finish_step(parts, began, done, source.sampled_tokens(done), epochs(), clock)
        return replace(report, metrics=report.metrics | source.end_step(done, version))

    roles.weight_sync.publish(roles.policy, roles.rollout)
    run_steps(body_of(parts, step, source.validating), parts.progress, plan.loop, parts.run)


def body_of(
    parts: RlRun,
    step: Callable[[int, Clock], StepReport],
    validating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoopBody:
    """The step of a reinforcement-learning run, with its validation, costs and messages; see GroupSource for ``validating``."""

    def validation(number: int, clock: Clock) -> dict[str, float]:
        with validating():
            return validate(parts.roles, parts.scorer, parts.plan, number, parts.run.folder, clock, parts.token_texts)

    return LoopBody(
        step=step,
        validate=validation,
        epochs=lambda: parts.loader.epochs,
        costs=parts.scorer.take_costs,
        watched=watched_of(parts.plan),
        notices=parts.roles.notices,
        workers_profiler=parts.roles.profiler,
    )


def watched_of(plan: RunPlan) -> tuple[Watched, ...]:
    """Return the alarms of a run: rewards that nothing is learned from have no signal to lose."""
    distillation = plan.step.distillation
    if distillation is None or not distillation.alone:
        return WATCHED
    return tuple(each for each in WATCHED if each.metric != NO_SIGNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A step as it began."""

    number: int
    version: int  # of the policy
    epochs: float  # passes over the data so far


def finish_step(
    parts: RlRun, began: Began, done: StepResult, sampled_tokens: int, epochs: float, clock: Clock
) -> StepReport:
    """Show the step to a curriculum, write its records, measure it, and move the reference where that is due.

    Args: ``epochs`` are the passes over the data at its end.
    """
    roles, plan, number = parts.roles, parts.plan, began.number
    curriculum = parts.loader.learned(done.selection.groups)
    found = numbers_of_rows(done.learned.train, done.learned.stats, roles.over_rows)
    write_records(parts.run.folder, number, done, plan, parts.token_texts, roles, found)
    metrics = step_metrics(done, sampled_tokens, began.version, roles, clock, plan.step.update.epochs, found)
    metrics |= {**parts.rewards.metrics, **curriculum}
    metrics["progress/epoch"] = epochs
    metrics |= move_reference(roles.policy, plan, number, began.epochs, epochs, clock)
    return StepReport(
        metrics=metrics,
        updates=done.learned.stats.updates,
        longest=longest_first(done.selection.groups),
        if_idle=no_update_message(number, done.scored.sequences.sample_ids),
        invalid=invalid_message(done.selection.groups),
    )


def move_reference(
    policy: TrainEngine, plan: RunPlan, step: int, epochs_before: float, epochs_after: float, clock: Clock
) -> dict[str, float]:
    """Mix the policy into the reference where that is due after a step. Returns its metric; none for a frozen reference."""
    if plan.reference_every is None:
        return {}
    moves = plan.reference_moves(step, epochs_before, epochs_after)
    if moves:
        with clock.phase("reference_update"):
            policy.move_reference(plan.reference_mix)
    return {"reference/moved": float(moves)}


def step_metrics(
    done: StepResult, sampled_tokens: int, version: int, roles: Roles, clock: Clock, epochs: int, found: RowNumbers
) -> dict[str, float]:
    """The measurements of a step but for its times; the policy was at ``version`` when it began."""
    groups, learned, sent_bytes = done.selection.groups, done.learned, roles.weight_sync.sent_bytes
    return {
        **measure(groups, learned.train, learned.stats, found),
        **staleness_metrics(groups, version),
        **clock.throughput(sampled_tokens, learned.train, roles.work, epochs),
        **done.selection.metrics(),
        **({"speed/weight_sync_mib": sent_bytes / 2**20} if sent_bytes else {}),
    }


def write_records(
    folder: Path,
    step: int,
    done: StepResult,
    plan: RunPlan,
    token_texts: TokenTexts,
    roles: Roles,
    found: RowNumbers,
) -> None:
    """Write samples and tensors of a step, in the steps where they are due. A step without an update is always written."""
    learned = done.learned
    if due(step, plan.samples_every) or not learned.stats.updates:
        write_samples(
            samples_path(folder, step),
            step,
            done.selection.groups,
            learned.train,
            token_rewards=learned.shaped.token_rewards,
            trainer_logprobs=learned.stats.trainer_logprobs,
            token_texts=token_texts,
            read_rows=roles.read_rows,
            first_advantages=found.first_advantages,
        )
    if due(step, plan.batches_every):
        save_step(batch_path(folder, step), done.scored, learned.shaped, learned.train, roles.over_rows)


def samples_path(folder: Path, step: int) -> Path:
    return folder / "samples" / f"step_{step}.jsonl"


def longest_first(groups: Sequence[ScoredGroup]) -> list[str]:
    """The sample ids of a step, longest response first: these show best what went wrong."""
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    return [one.sample_id for one in sorted(trajectories, key=lambda one: len(one.token_ids), reverse=True)]


def invalid_message(groups: Sequence[ScoredGroup]) -> str:
    """Responses without a valid reward, by reason and with examples; "" where all have one."""
    failures = failures_of(groups)
    if not failures:
        return ""
    responses = sum(len(group.outcomes) for group in groups)
    what = f"{len(failures)} of {responses} responses have no valid reward and are left out ({counted(failures)})"
    return f"{what}:\n{examples(failures)}"


def no_update_message(step: int, sample_ids: Sequence[str]) -> str:
    """Possible causes of a step without an update, and where to look."""
    return (
        f"losses or gradients were not finite, or no response had a valid reward. Samples of the last step: "
        f"{', '.join(sample_ids[:3])}, ... in samples/step_{step}.jsonl"
    )
