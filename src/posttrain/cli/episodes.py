"""Evaluation and generation from the configuration of a run: its rows, environments, sampling and rewards, without training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posttrain.cli.errors import placed_by
from posttrain.errors import ConfigError, Problem, RequestError, RunStopped

if TYPE_CHECKING:
    from posttrain.config import RunConfig
    from posttrain.dialects.loaded import LoadedConfig

ROWS_PER_PART = 32


def only_of_a_run(options: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raises: ConfigError for options that a file of prompts or responses has no use for. Args: ``keys`` are those it has
    instead."""
    given = [
        name for name, value in options.items() if value and not (name == "--rows-per-part" and value == ROWS_PER_PART)
    ]
    if given:
        raise ConfigError([
            Problem(f"{name} is for the configuration of a run", fix=f"set {keys[name]}" if name in keys else "leave it out")
            for name in given
        ])  # fmt: skip


def check_run(loaded: LoadedConfig[RunConfig], *, training: bool) -> None:
    """Check the configuration and the files that its episodes need. Raises: RequestError with all problems."""
    from posttrain.config.roles import reads_references
    from posttrain.data.readers import check_files
    from posttrain.plan.checks.environments import check_environments
    from posttrain.plan.files import check_model_files
    from posttrain.rewards.load import check_rewards

    config = loaded.config
    unread: dict[str, list[str]] = {"validation_files": []} if training else {"train_files": []}
    generated = config.environment.train_episodes is not None or not training
    found = [
        *check_files(config.data.model_copy(update=unread), needed=not generated, references=reads_references(config)),
        *check_rewards(config.reward),
        *check_environments(config),
        *check_model_files(config.model),
    ]
    planned = [problem for problem in loaded.unsupported if problem.field.startswith(("custom_envs", "environment"))]
    # A file to train on is not needed to look at the validation rows.
    files = loaded.key("data.train_files")
    checked = [problem for problem in loaded.problems if training or problem.field != files]
    if problems := [*checked, *planned, *loaded.further(found)]:
        raise RequestError(problems)


def named_models(given: Sequence[str], path: str) -> dict[str, str]:
    """Read NAME=PATH, or PATH, which is named after its last part. Args: ``path``, of the configuration's model.

    Returns: path by name, the configuration's alone where none is given. Raises: ConfigError for a name that stands twice.
    """
    found: dict[str, str] = {}
    for one in given or [path]:
        name, equals, named = one.partition("=")
        name, named = (name, named) if equals else (Path(one).name, one)
        if name in found or not named or name in ("", ".", "..") or "/" in name:
            what = f"two models are called {name}" if name in found else f"--model {one} has no name and path"
            raise ConfigError(Problem(what, fix="write --model NAME=PATH, each with a name of its own"))
        found[name] = named
    return found


def evaluate_run_config(loaded: LoadedConfig[RunConfig], options: Mapping[str, Any], *, as_json: bool) -> None:
    """Play the episodes of a run's configuration with one or several models, and print their metrics."""
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.evaluation_text import print_result
    from posttrain.cli.hub import hub_folder
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.progress import WorkProgress
    from posttrain.config.evaluate import MetricsConfig

    config = loaded.config
    models = named_models(options["--model"], config.model.path)
    check_run(loaded, training=options["--training"])
    for line in remarks(loaded):
        typer.echo(line, err=True)
    start = loaded.config.model.path
    loaded = get_ready(loaded)
    config = loaded.config
    models = {name: config.model.path if path == start else path for name, path in models.items()}
    models = {name: hub_folder(path, "--model") for name, path in models.items()}
    # Imports torch, which reads the environment that get_ready() has set
    from posttrain.build.evaluate_episodes import EvaluationRequest, evaluate_episodes

    folder = options["--out"] or Path(f"{config.run.name}.evaluation")
    score = options["--pass-score"]
    request = EvaluationRequest(
        config=config,
        folder=folder,
        models=models,
        metrics=MetricsConfig() if score is None else MetricsConfig(pass_score=score),
        by_score=score is not None,
        training=options["--training"],
        rows_per_part=options["--rows-per-part"],
        overwrite=options["--overwrite"],
    )
    bars: list[WorkProgress] = []

    def begin(name: str) -> Any:
        bar = WorkProgress(f"evaluate {name}", unit="rows", detail="tokens", stream=sys.stderr if as_json else None)
        bars.append(bar.__enter__())

        def on_plan(rows: int, done: int, notes: list[str]) -> None:
            for note in notes:
                typer.echo(note, err=as_json)
            if 0 < done < rows:
                typer.echo(f"resuming after {done} of {rows} rows", err=as_json)
            bar.begin(rows, done)

        return on_plan, bar.advance

    try:
        with placed_by(loaded):
            found = evaluate_episodes(request, begin=begin)
    finally:
        for bar in bars:
            bar.__exit__(None, None, None)
    for name, results in found.items():
        if as_json:
            typer.echo((_folder(folder, name, models) / "results.json").read_text(encoding="utf-8"), nl=False)
            continue
        if len(models) > 1:
            typer.echo(f"--- {name}")
        for result in results:
            print_result(result)
    if not as_json:
        typer.echo(f"wrote {folder}: report.html, and results.json, episodes.parquet, dumped_evals/ of each model")
    _check_invalid(config, found)


def _folder(folder: Path, name: str, models: Mapping[str, str]) -> Path:
    return folder / name if len(models) > 1 else folder


def _check_invalid(config: RunConfig, found: Mapping[str, Any]) -> None:
    """Raises: RunStopped when more episodes have no score than the run allows."""
    for name, results in found.items():
        invalid, responses = max((sum(result.invalid.values()), result.responses) for result in results)
        if invalid > config.reward.max_invalid_share * responses:
            raise RunStopped(
                f"{name}: {invalid} of {responses} episodes have no score, more than reward.max_invalid_share = "
                f"{config.reward.max_invalid_share:g} allows; the reasons are in dumped_evals/"
            )
