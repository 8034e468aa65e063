"""Tuning on rows of a file, update by update, whatever the method: preferences, rewards, a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from posttrain.interfaces.loader import StepLoader
from posttrain.interfaces.roles import Learner
from posttrain.interfaces.tuning import Task
from posttrain.loops.sft import longest_first, measure, no_update_message
from posttrain.loops.training import LoopBody, LoopPlan, StepReport, run_steps
from posttrain.run.clock import Clock
from posttrain.run.health import WATCHED_SFT
from posttrain.run.lifetime import Run
from posttrain.run.progress import Progress

Row = TypeVar("Row")


def run(
    learner: Learner,
    task: Task[Row],
    loader: StepLoader[Row],
    validation: Sequence[Row],
    progress: Progress,
    plan: LoopPlan,
    run: Run,
) -> None:
    """The updates of a run, one after the other, with what lies between them; see loops.training.run_steps."""

    def step(number: int, clock: Clock) -> StepReport:
        rows = loader.next()
        stats = task.step(rows, clock)
        texts = task.texts(rows)
        metrics = dict(stats.metrics) | measure(texts, clock)
        metrics["progress/epoch"] = loader.epochs
        return StepReport(
            metrics=metrics, updates=stats.updates, longest=longest_first(texts), if_idle=no_update_message(texts)
        )

    body = LoopBody(
        step=step,
        validate=lambda number, clock: task.validate(validation, clock) if validation else {},
        watched=WATCHED_SFT,
        samples_place="the training files",
        notices=learner.notices,
        workers_profiler=learner.profiler,
    )
    run_steps(body, progress, plan, run)
