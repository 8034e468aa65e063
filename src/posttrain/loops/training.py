"""The loop around the steps of a synchronous run, whatever the steps learn: cadences, records, alarms, stopping and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.roles import WorkersProfiler
from posttrain.records.notices import FROM_OWN_FUNCTIONS, Notices
from posttrain.records.plans import ProfilePlan
from posttrain.run.clock import Clock
from posttrain.run.expiry import Expiry
from posttrain.run.exports import export_models
from posttrain.run.health import Health, Watched
from posttrain.run.lifetime import Run
from posttrain.run.profile import Profiler
from posttrain.run.progress import Progress
from posttrain.run.step_ends import before_updates, due, end_step, leave_step
from posttrain.run.stopping import StepAbandoned
from posttrain.run.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The length of a run and its cadences, each a number of steps; several of one kind count each for itself."""

    total_steps: int
    max_skipped_steps: int  # in a row, without an update
    validate_every: tuple[int, ...] = ()
    validate_before: bool = False
    validate_after: bool = False
    validate_only: bool = False  # the weights that the run begins with; no steps
    save_every: tuple[int, ...] = ()
    save_at_end: bool = False
    save_in_background: bool = False  # while the next step begins
    expiry_margin_s: float | None = None  # besides a step; None: the machine's end is not looked at
    most_epochs: int | None = None  # passes over the data after which it ends, too; None: these make up the steps
    export_every: int | None = None  # plain Hugging Face folders, also at the end; None: never
    export_folder: Path | None = None
    profile: ProfilePlan = field(default_factory=ProfilePlan)

    def save_steps(self, first_step: int) -> list[int]:
        """The steps from ``first_step`` on after which a checkpoint is written."""
        if self.validate_only:
            return []
        return [step for step in range(first_step, self.total_steps + 1) if self.saves(step)]

    def are_over(self, epochs: float) -> bool:
        """Return True when the data were passed over as often as the run may."""
        return self.most_epochs is not None and epochs >= self.most_epochs

    def ended_early(self, step: int) -> str:
        """Return the message of a run whose data end before its planned steps."""
        passes = "once" if self.most_epochs == 1 else f"{self.most_epochs} times"
        return (
            f"the run ends after step {step} of {self.total_steps}: its steps drew further batches (group_filter.strategy), and "
            f"the training data were passed over {passes} (run.total_epochs)"
        )

    def saves(self, step: int) -> bool:
        """True if a checkpoint is due after a step."""
        return any(due(step, every) for every in self.save_every) or (step == self.total_steps and self.save_at_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A finished step."""

    metrics: dict[str, float]  # but for its times
    updates: int  # made by the model that made fewest of them
    longest: Sequence[str]  # names of its samples, the longest first: these show best what went wrong
    if_idle: str  # where to look when the step made no update
    invalid: str = ""  # which responses have no valid reward, and why


Turns = Generator[tuple[int, Clock], StepReport, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBody:
    """Everything that one kind of training does inside the loop."""

    step: Callable[[int, Clock], StepReport]  # may raise StepAbandoned before its first update
    validate: Callable[[int, Clock], dict[str, float]]  # after a step; 0: the starting weights
    epochs: Callable[[], float] = float  # passes over the data so far
    costs: Callable[[], dict[str, float]] = dict  # metrics of servers, since the last call
    watched: Sequence[Watched]
    samples_place: str | None = None  # where samples of a step are found; None: in samples/step_N.jsonl
    notices: Notices
    workers_profiler: WorkersProfiler | None = None


def run_steps(body: LoopBody, progress: Progress, plan: LoopPlan, run: Run) -> None:
    """Make steps run.first_step to plan.total_steps with ``body.step``; see ``steps_of``."""
    turns = steps_of(body, progress, plan, run)
    turn = next(turns, None)
    while turn is not None:
        try:
            done = body.step(*turn)
        except StepAbandoned as abandoned:
            turns.throw(abandoned)
        turn = next_turn(turns, done)


def next_turn(turns: Turns, done: StepReport) -> tuple[int, Clock] | None:
    """Report a finished step, and return the next one; None after the last."""
    try:
        return turns.send(done)
    except StopIteration:
        return None


def steps_of(body: LoopBody, progress: Progress, plan: LoopPlan, run: Run) -> Turns:
    """Yield steps run.first_step to plan.total_steps, or to the end of the data, each with its clock. Whoever makes a step sends
    its report, or throws StepAbandoned; validation, checkpoints, exports and records come in between at their cadences.

    Raises: RunStopped when steps in a row bring no update; RunInterrupted after saving, when a signal asked to stop.
    """
    checkpoints, trackers, stop = run.checkpoints, run.trackers, run.stop
    timeline = Timeline(run.folder, run.first_step, trackers.message, checkpoints.written_s(run.first_step - 1))
    profiler = Profiler(plan.profile, run.folder, trackers.message, body.workers_profiler)
    health = Health(body.watched)
    expiry = Expiry(plan.expiry_margin_s, trackers.message)
    metrics: dict[str, float] = {}

    def save(number: int, background: bool = False) -> str:
        return checkpoints.save(number, progress, metrics, background=background)

    if plan.validate_only or (run.first_step == 1 and plan.validate_before):
        held = run.first_step - 1
        clock = Clock(trackers, held, stop, timeline, profiler)
        try:
            metrics = body.validate(held, clock) | body.costs()
            trackers.log(held, metrics | clock.metrics())
        except StepAbandoned:
            raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin") from None
    if plan.validate_only:
        return
    for step in range(run.first_step, plan.total_steps + 1):
        if plan.are_over(body.epochs()):
            trackers.message(plan.ended_early(step - 1))
            return
        clock = Clock(trackers, step, stop, timeline, profiler, before_updates(checkpoints, trackers, stop))
        began = time.monotonic()
        before = progress.positions()
        try:
            done = yield step, clock
        except StepAbandoned:  # before its first update: data was drawn, and rewards may have been counted
            progress.go_back(before)
            leave_step(step, save, checkpoints, trackers, stop)
        is_early = step < plan.total_steps and plan.are_over(body.epochs())
        last = is_early or step == plan.total_steps
        notices = [*body.notices.take(), *FROM_OWN_FUNCTIONS.take(), *([plan.ended_early(step)] if is_early else [])]
        for text in notices:
            trackers.message(text)
        metrics = done.metrics
        progress.idle_steps = 0 if done.updates else progress.idle_steps + 1
        gives_up = progress.idle_steps >= plan.max_skipped_steps
        if not gives_up and (any(due(step, every) for every in plan.validate_every) or (last and plan.validate_after)):
            metrics |= body.validate(step, clock)
        metrics |= body.costs()
        # Logged before it is saved: a resumed run drops the lines of steps that no checkpoint holds and writes them again.
        trackers.log(step, metrics | clock.metrics())
        if gives_up:
            what = f"{progress.idle_steps} steps in a row made no update (step {step} was the last)"
            raise RunStopped("\n".join([f"{what}: {done.if_idle}", *notices]))
        for alarm in health.look(step, metrics, done.longest, place=body.samples_place, invalid=done.invalid):
            trackers.message(alarm)
        if plan.export_folder and (due(step, plan.export_every) or (last and plan.export_every)):
            exported = export_models(plan.export_folder, step, progress.policy, progress.critic)
            trackers.message(f"exported {exported}")
        end_step(
            step,
            save,
            trackers,
            stop,
            save_due=plan.saves(step) or (last and plan.save_at_end) or expiry.near(time.monotonic() - began),
            last=last,
            background=plan.save_in_background,
            timeline=timeline,
        )
