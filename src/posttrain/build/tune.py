"""Run tuning from a TuneConfig: preferences, or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from posttrain.build.fits import check_texts_fit
from posttrain.build.plans import sft_plan
from posttrain.build.reference_logps import scored, with_reference_logps
from posttrain.build.runs import as_written, open_run, run_trackers, say_nothing
from posttrain.config.roles import releases_reference, runtime_of
from posttrain.config.tune import TuneConfig
from posttrain.data.loader import ShuffledLoader
from posttrain.data.own_preferences import load_own_preferences
from posttrain.data.preferences import PreferenceSet, load_preferences
from posttrain.data.sft import What
from posttrain.errors import ConfigError
from posttrain.interfaces.roles import Tuned
from posttrain.interfaces.train_engine import ScoreEngine, TrainEngine
from posttrain.loops import tune
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.plan.checks.tune import image_problems
from posttrain.plan.tune import plan_tune
from posttrain.records.plans import PreferencePlan
from posttrain.records.preferences import Preference
from posttrain.registry import RUNTIMES
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.lifetime import begin_run, under_way
from posttrain.run.progress import Progress
from posttrain.run.run_folder import RunFolder
from posttrain.steps.preferences import LogprobModel, PreferenceModel, PreferenceTask, ScoreModel

SCORING = "scoring all rows by the reference"


def tune_run(
    config: TuneConfig,
    *,
    allow_config_change: bool = False,
    start_over: bool = False,
    say: Callable[[str], None] = say_nothing,
    in_words: Callable[[str], str] = as_written,
) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Args and Raises: as build.sft.sft_run.
    """
    opened = open_run(config, allow_config_change=allow_config_change, start_over=start_over)
    with opened as (folder, checkpoints, notes):
        return _train(config, folder, checkpoints, notes, say, in_words)


def _train(
    config: TuneConfig,
    folder: RunFolder,
    checkpoints: Checkpoints,
    notes: list[str],
    say: Callable[[str], None],
    in_words: Callable[[str], str],
) -> Path:
    import_modules(config.model.external_modules)
    say("loading tokenizer and data")
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data)

    def load(files: Sequence[str], what: What) -> PreferenceSet:
        if config.data.dataset_class_file is not None:
            return load_own_preferences(files, config, tokenizer, what=what)
        return load_preferences(files, config, tokenizer, processor, what=what)

    training = load(config.data.train_files, "training")
    validation = PreferenceSet(rows=[], read=0)
    if config.data.validation_files:
        validation = load(config.data.validation_files, "validation")
    rows, held_out = training.rows[: config.data.max_rows], validation.rows[: config.validation.max_rows]
    batches, problems = plan_tune(config, len(rows))
    if any(text.images for row in (*rows, *held_out) for text in row.sides):
        problems = [*problems, *image_problems(config)]
    if batches is None or problems:
        raise ConfigError(problems)
    check_texts_fit(config, [text for row in (*rows, *held_out) for text in row.sides])
    if releases_reference(config):
        say(SCORING)
        rows, held_out = with_reference_logps(config, rows, held_out)
    plan = sft_plan(config, batches, validates=bool(held_out))
    trackers = run_trackers(config.tracking, folder.path, in_words)
    say(f"loading model {config.model.path}")
    runtime = RUNTIMES.get(runtime_of(config.placement))()
    with closing(runtime.start_tune(config, batches, tokenizer)) as started:
        tuned = started
        if config.scores_before and started.reference is not None:
            say(SCORING)
            rows, held_out = (scored(each, started.reference) for each in (rows, held_out))
            tuned = replace(started, reference=None)
        loader = _loader(config, rows)
        progress = Progress(policy=tuned.engine, loader=loader)
        first_step = checkpoints.restore(progress, trackers.message) + 1
        about_data = [*training.notes("training"), *validation.notes("validation")]
        begin_run(
            config,
            folder,
            checkpoints,
            trackers,
            first_step=first_step,
            total_steps=plan.total_steps,
            device=tuned.device,
            notes=[*notes, *about_data, *tuned.notes],
            saved_bytes=checkpoints.bytes_of(progress.engines.values()),
            save_steps=plan.save_steps(first_step),
        )
        with under_way(config, folder, checkpoints, trackers, first_step) as run:
            tune.run(tuned, task_of(config, tuned), loader, held_out, progress, plan, run)
    return folder.path


def _loader(config: TuneConfig, rows: Sequence[Preference]) -> ShuffledLoader[Preference]:
    return ShuffledLoader(
        rows,
        config.rows_per_step,
        seed=config.run.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        kind="pairs" if config.method.paired else "completions",
        sequences=2 if config.method.paired else 1,
    )


def task_of(config: TuneConfig, tuned: Tuned) -> PreferenceTask:
    """Build the task of the configured method: its loss, and the models that it reads."""
    method = config.method
    model: PreferenceModel = (
        ScoreModel(cast(ScoreEngine, tuned.engine)) if method.scored else LogprobModel(cast(TrainEngine, tuned.engine))
    )
    return PreferenceTask(
        model=model,
        plan=PreferencePlan(name=method.name, path=method.path, parameters=method.settings, paired=method.paired),
        reference=tuned.reference,
        needs_kl=method.needs_kl,
        max_tokens=config.data.max_tokens,
    )
