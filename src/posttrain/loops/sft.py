"""Supervised fine-tuning: learn the texts of a file, update by update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.data.text_batches import text_batch
from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.loader import StepLoader
from posttrain.interfaces.roles import WorkersProfiler
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.notices import Notices
from posttrain.records.plans import LossPlan, ProfilePlan, UpdatePlan
from posttrain.records.statistics import UpdateStats
from posttrain.records.texts import Text
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.clock import Clock
from posttrain.run.exports import export_models
from posttrain.run.health import WATCHED_SFT, Health
from posttrain.run.profile import Profiler
from posttrain.run.step_ends import before_updates, due, end_step, leave_step
from posttrain.run.stopping import StepAbandoned, StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.trackers import Trackers
from posttrain.steps.text_loss import mean_loss
from posttrain.steps.update import update

# The mean of -log pi over the learned tokens of the whole step, whatever the micro-batches are.
LOSS = LossPlan(name="cross_entropy", aggregation="token_mean", temperature=1.0)
# What a supervised update has to say; the other metrics of the policy compare it with a sampler.
METRICS = ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/lr", "policy/skipped_updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """What the run does, and when. Cadences are numbers of steps, each of which counts for itself."""

    total_steps: int
    validation: Sequence[Text]
    max_skipped_steps: int
    validate_every: tuple[int, ...]
    validate_before: bool
    validate_after: bool
    save_every: tuple[int, ...]
    save_at_end: bool
    save_in_background: bool = False  # while the next step reads its texts
    export_every: int | None = None  # plain Hugging Face folders, also at the end
    export_folder: Path | None = None
    profile: ProfilePlan = field(default_factory=ProfilePlan)


def sft_step(policy: TrainEngine, batch: TrainBatch, clock: Clock) -> UpdateStats:
    """One update by maximum likelihood: the gradient of the mean of -log pi(token | text before it) over learned tokens."""
    plan = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=len(batch), on_policy=True)
    with clock.phase("update", total=len(batch)):
        return update(policy, batch, plan, clock.advance)


def run(
    policy: TrainEngine,
    loader: StepLoader[Text],
    plan: SftPlan,
    *,
    first_step: int,
    folder: Path,
    checkpoints: Checkpoints,
    trackers: Trackers,
    notices: Notices,
    stop: StopSignal,
    workers_profiler: WorkersProfiler | None = None,
) -> None:
    """Steps first_step to plan.total_steps, with validation and checkpoints at their cadences.

    Raises: RunStopped when steps in a row bring no update; RunInterrupted after saving, when a signal asked to stop.
    """
    timeline = Timeline(folder, first_step, trackers.message)
    profiler = Profiler(plan.profile, folder, trackers.message, workers_profiler)
    metrics: dict[str, float] = {}

    def save(number: int, background: bool = False) -> str:
        return checkpoints.save(number, policy, loader, metrics=metrics, background=background)

    if first_step == 1 and plan.validate_before and plan.validation:
        clock = Clock(trackers, 0, stop, timeline, profiler)
        try:
            metrics = validate(policy, plan.validation, clock)
            trackers.log(0, metrics | clock.metrics())
        except StepAbandoned:
            raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin") from None
    health = Health(WATCHED_SFT)
    skipped_in_a_row = 0
    for step in range(first_step, plan.total_steps + 1):
        clock = Clock(trackers, step, stop, timeline, profiler, before_updates(checkpoints, trackers, stop))
        last = step == plan.total_steps
        before = loader.state()
        texts = loader.next()
        batch = text_batch(texts)
        try:
            stats = sft_step(policy, batch, clock)
        except StepAbandoned:  # before the update
            loader.restore(before)
            leave_step(step, save, checkpoints, trackers, stop)
        for text in notices.take():
            trackers.message(text)
        metrics = {name: stats.metrics[name] for name in METRICS if name in stats.metrics} | measure(texts, clock)
        metrics["progress/epoch"] = loader.epochs
        skipped_in_a_row = 0 if stats.updates else skipped_in_a_row + 1
        if skipped_in_a_row >= plan.max_skipped_steps:
            trackers.log(step, metrics | clock.metrics())
            raise RunStopped(no_update_message(skipped_in_a_row, step, texts))
        if any(due(step, every) for every in plan.validate_every) or (last and plan.validate_after):
            metrics |= validate(policy, plan.validation, clock)
        # Logged before it is saved: a resumed run drops the lines of steps that no checkpoint holds and writes them again.
        trackers.log(step, metrics | clock.metrics())
        for alarm in health.look(step, metrics, longest_first(texts), place="the training files"):
            trackers.message(alarm)
        if plan.export_folder and (due(step, plan.export_every) or (last and plan.export_every)):
            trackers.message(f"exported {export_models(plan.export_folder, step, policy)}")
        save_due = any(due(step, every) for every in plan.save_every) or (last and plan.save_at_end)
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


def validate(policy: TrainEngine, texts: Sequence[Text], clock: Clock) -> dict[str, float]:
    """The mean loss over the learned tokens of held-out texts."""
    if not texts:
        return {}
    with clock.phase("validation_loss", total=len(texts)):
        return {"validation/loss": mean_loss(policy, texts, clock.advance)}


def measure(texts: Sequence[Text], clock: Clock) -> dict[str, float]:
    """Sizes of a step's texts, and how fast they were learned."""
    tokens = sum(len(text.token_ids) for text in texts)
    return {
        "data/tokens": float(tokens),
        "data/learned_tokens": float(sum(int(text.learned.sum()) for text in texts)),
        "data/length_mean": tokens / len(texts),
        "data/length_max": float(max(len(text.token_ids) for text in texts)),
        "speed/update_tokens_per_s": tokens / clock.metrics()["time/update_s"],
    }


def longest_first(texts: Sequence[Text]) -> list[str]:
    """The names of a step's rows, those with most tokens first."""
    return [text.name for text in sorted(texts, key=lambda text: len(text.token_ids), reverse=True)]


def no_update_message(steps: int, step: int, texts: Sequence[Text]) -> str:
    """Why a run that makes no updates ended, and where to look."""
    rows = ", ".join(text.name for text in texts[:3])
    return (
        f"{steps} steps in a row made no update (step {step} was the last): losses or gradients were not finite. Rows of "
        f"the last step: {rows}, ..."
    )
