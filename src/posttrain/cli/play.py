"""``posttrain play``: play one episode of a run's environment by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here
from posttrain.cli.viewer.words import visible
from posttrain.errors import Problem, RequestError, RunStopped

if TYPE_CHECKING:
    from posttrain.config import RunConfig
    from posttrain.dialects.loaded import LoadedConfig
    from posttrain.loops.by_hand import ReadTurn


def play(
    arguments: Arguments = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help=r"Take the turns from a file, one per line (\n is a line break); - reads stdin."
        ),
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Let the model take the turns.")] = False,
    row: Annotated[int, typer.Option(min=0, help="Row of the data, or number of the generated episode, from 0.")] = 0,
    validation: Annotated[bool, typer.Option("--validation", help="Take the row from the validation data.")] = False,
    environment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Play this one of environment.named, whatever the row names.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the environment; by default the row's.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="List every token with its id and its mask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the episode as JSON, and nothing else.")] = False,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
) -> None:
    r"""Play one episode of a run's environment: you take the turns, or a script, or the model.

    Shows what the policy reads, the environment's answers, the rewards and the end, and marks the tokens that would be trained.
    A turn is a line, in which \n is a line break; the end of the input (Ctrl-D) leaves the episode.
    """
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.hub import with_hub_data
    from posttrain.cli.play_text import PlayText, as_json, summary
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import TRAIN

    if script is not None and model:
        raise RequestError(
            Problem("the turns come from a script or from the model", fix="leave --script or --model out")
        )
    loaded = load_request(arguments or [], dialect, TRAIN, here=here, drop_unknown=drop_unknown)
    loaded = with_hub_data(loaded)
    _check(loaded)
    read = None if model else _reader(script)
    loaded = get_ready(loaded)
    from posttrain.build.play import EpisodeChoice, play_run

    choice = EpisodeChoice(row=row, validation=validation, environment=environment, seed=seed)
    shown = PlayText(typed=script is None and not model, quiet=json)
    with stopped_at_once("left the episode"), placed_by(loaded):
        played = play_run(loaded.config, choice, read, shown.begin)
    typer.echo(as_json(played, shown.decoder) if json else visible(summary(played, shown.decoder, tokens=tokens)))
    [trajectory] = played.group.trajectories
    if trajectory.failure_reason:
        raise RunStopped(f"the episode is not complete: {trajectory.failure_reason}: {trajectory.failure}")


def _check(loaded: LoadedConfig[RunConfig]) -> None:
    """Check the configuration and the files that an episode needs. Raises: RequestError with all problems."""
    from posttrain.config.roles import reads_references
    from posttrain.data.readers import check_files
    from posttrain.plan.checks.environments import check_environments
    from posttrain.plan.files import check_model_files
    from posttrain.rewards.load import check_rewards

    config = loaded.config
    found = [
        *check_files(
            config.data,
            needed=config.environment.train_episodes is None,
            references=reads_references(config),
        ),
        *check_rewards(config.reward),
        *check_environments(config),
        *check_model_files(config.model),
    ]
    # A planned environment has another one in its place, for plans.
    planned = [problem for problem in loaded.unsupported if problem.field.startswith(("custom_envs", "environment"))]
    if problems := [*loaded.problems, *planned, *loaded.further(found)]:
        raise RequestError(problems)


def _reader(script: str | None) -> ReadTurn:
    """Return what reads the next turn: of a script, of standard input, or of the person at the terminal."""
    if script is not None and script != "-":
        try:
            lines = iter(Path(script).expanduser().read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(Problem(f"the script cannot be read: {error}", fix="name a text file")) from None
        return lambda _: _unescaped(next(lines, None))
    asks = script is None and sys.stdin.isatty()

    def read(tokens: int) -> str | None:
        if asks:
            typer.echo(f"your turn, up to {tokens} tokens> ", nl=False)
        line = sys.stdin.readline()
        return _unescaped(line.removesuffix("\n")) if line else None

    return read


def _unescaped(line: str | None) -> str | None:
    r"""``\n`` is a line break, and ``\\`` a backslash."""
    if line is None:
        return None
    return "\\".join(part.replace("\\n", "\n") for part in line.split("\\\\"))
