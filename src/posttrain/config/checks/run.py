"""Checks of every run that trains: resuming, keeping checkpoints, engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from posttrain.config import TrainingConfig
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.config.roles import trained_roles
from posttrain.config.run import RunSection
from posttrain.errors import Problem


def naming_problems(config: TrainingConfig) -> Iterator[Problem]:
    """A name becomes the last part of a path, or the last parts."""
    parts = PurePosixPath(config.run.name.lstrip("/")).parts
    if not parts or ".." in parts:
        what = f"the run {config.run.name!r} would not lie below the folder of its kind: its name is the end of a path"
        fix = "use a name without .., and run.folder for another place"
        yield Problem(what, fix=fix, field="run.name")


def resuming_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Report contradictory settings of checkpoints and resuming."""
    if config.checkpoint.keep_best is not None and config.checkpoint.best_metric is None:
        what = "checkpoint.keep_best needs the metric that says what is best"
        fix = "name one of metrics.jsonl, such as checkpoint.best_metric=reward/mean"
        yield Problem(what, fix=fix, field="checkpoint.keep_best")
    if config.run.resume == "never" and config.run.resume_path is not None:
        what = "run.resume=never and a path to resume from contradict each other"
        yield Problem(what, fix="use run.resume=auto", field="run.resume_path")


def saving_warnings(config: TrainingConfig) -> Iterator[str]:
    """Rules about what is saved that have no effect."""
    for role, learner in trained_roles(config):
        if config.checkpoint.sharded and learner.lora is not None:
            yield f"checkpoint.sharded has no effect on the {role}: its adapter is small, and the first process writes it"


def within_epochs_warnings(run: RunSection) -> list[str]:
    """Report within_epochs where it has no effect."""
    if not run.within_epochs or run.total_steps is not None:
        return []
    return ["run.within_epochs has no effect: run.total_steps is null, so the run is all its epochs"]


def retention_warnings(rules: CheckpointConfig) -> Iterator[str]:
    """Rules about keeping and copying checkpoints that have no effect."""
    if rules.keep_last is None:
        for name in ("keep_best", "keep_every"):
            if getattr(rules, name) is not None:
                yield f"checkpoint.{name} has no effect: checkpoint.keep_last is null, so all are kept"
    if rules.keep_best is None and rules.best_metric is not None:
        yield "checkpoint.best_metric has no effect: checkpoint.keep_best is null"
    for name in ("upload_keep_last", "upload_wait_s"):
        if rules.upload is None and getattr(rules, name) != CheckpointConfig.model_fields[name].default:
            yield f"checkpoint.{name} has no effect: checkpoint.upload is null"
    if rules.export_folder is not None and rules.export_every_steps is None:
        yield "checkpoint.export_folder has no effect: checkpoint.export_every_steps is null"
