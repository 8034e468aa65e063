"""``posttrain replay``: repeat the sampling, scoring or update of a recorded step in isolation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.errors import Problem, RequestError

if TYPE_CHECKING:
    from posttrain.build.replay import Difference
    from posttrain.config import RunConfig

SHOWN = 20  # most differences that are printed
OVERRIDES = {"ignore_unknown_options": True}
app = typer.Typer(
    help="Repeat one part of a recorded step in isolation, to find the part that causes a problem.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of the run; nothing in it is changed.")]
Changes = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]", help="Settings of the run to change.")]
Out = Annotated[Path | None, typer.Option(help="Write all differences to this file, a JSON object per line.")]


@app.callback()
def replay() -> None:
    """Repeat one part of a recorded step in isolation, to find the part that causes a problem."""


@app.command("train", context_settings=OVERRIDES)
def train(
    run_folder: Folder,
    changes: Changes = None,
    step: Annotated[int | None, typer.Option(min=1, help="The step; by default the last one recorded.")] = None,
    out: Out = None,
) -> None:
    """Repeat the update on recorded batches (tracking.batches_every_steps), and compare its metrics."""
    config = _config(run_folder, changes)
    from posttrain.build.replay import replay_train

    number, differences = replay_train(run_folder, config, step)
    _print_differences(differences, f"metrics of the update of step {number}", out)


@app.command("rollout", context_settings=OVERRIDES)
def rollout(
    run_folder: Folder,
    step: Annotated[int, typer.Option(min=1, help="A step that began at a checkpoint, or 1.")],
    changes: Changes = None,
    out: Out = None,
) -> None:
    """Sample the prompts of a step again, with the weights of that step, and compare the responses."""
    config = _config(run_folder, changes)
    from posttrain.build.replay import replay_rollout

    _print_differences(replay_rollout(run_folder, config, step), f"responses of step {step}", out)


@app.command("rewards", context_settings=OVERRIDES)
def rewards(
    run_folder: Folder,
    step: Annotated[int, typer.Option(min=0, help="The step whose samples to score.")],
    changes: Changes = None,
    validation: Annotated[bool, typer.Option("--validation", help="The samples of its validation instead.")] = False,
    out: Out = None,
) -> None:
    """Score the recorded responses of a step again, and compare the rewards. No model is loaded."""
    config = _config(run_folder, changes)
    from posttrain.build.replay import replay_rewards

    found = replay_rewards(run_folder, config, step, validation=validation)
    _print_differences(found, f"rewards of {'the validation at ' if validation else ''}step {step}", out)


def _config(folder: Path, changes: Sequence[str] | None) -> RunConfig:
    """Read the configuration that the run wrote, and apply the changes. Raises: RequestError with all problems."""
    from posttrain.cli.process import prepare
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import TRAIN
    from posttrain.report.read import read_run

    read_run(folder)  # reports a folder that holds no run
    if not (folder / "config.yaml").is_file():
        fix = "it is the configuration that the run wrote when it began"
        raise RequestError(Problem(f"there is no config.yaml in {folder}", fix=fix))
    loaded = load_request([str(folder / "config.yaml"), *(changes or [])], "native", TRAIN)
    if loaded.problems or loaded.unsupported:
        raise RequestError([*loaded.problems, *loaded.unsupported])
    config: RunConfig = loaded.config
    if Path(config.folder).resolve() != folder.resolve():  # the folder was moved after the run
        config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder)})})
    prepare(config)
    return config


def _print_differences(differences: Sequence[Difference], what: str, out: Path | None) -> None:
    other = [one for one in differences if not one.same]
    typer.echo(f"{len(differences) - len(other)} of {len(differences)} {what} are the same")
    for one in other[:SHOWN]:
        typer.echo(f"  {one.name}: {_short(one.recorded)} -> {_short(one.now)}")
    if len(other) > SHOWN:
        typer.echo(f"  and {len(other) - SHOWN} more" + ("" if out else "; --out FILE writes them all"))
    if out is not None:
        lines = [json.dumps({"name": one.name, "recorded": one.recorded, "now": one.now}) + "\n" for one in differences]
        out.write_text("".join(lines), encoding="utf-8")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
