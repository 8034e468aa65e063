"""``posttrain train``: check everything, then run."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.plan import ARGUMENTS_HELP, DIALECT_HELP, HERE_HELP
from posttrain.errors import RequestError


def train(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="FILE [KEY=VALUE]", help=ARGUMENTS_HELP)] = None,
    dialect: Annotated[str | None, typer.Option(help=DIALECT_HELP)] = None,
    here: Annotated[bool, typer.Option("--here", help=HERE_HELP)] = False,
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change", help="Go on with the run in run.folder although settings of it have changed."
        ),
    ] = False,
) -> None:
    """Train a model with reinforcement learning."""
    try:
        _train(arguments or [], dialect, here=here, allow_config_change=allow_config_change)
    except KeyboardInterrupt:  # a second signal, or one before the first step
        typer.echo("posttrain: stopped at once", err=True)
        raise typer.Exit(130) from None


def _train(arguments: list[str], dialect: str | None, *, here: bool, allow_config_change: bool) -> None:
    from posttrain.cli.box_text import box_text
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.process import prepare
    from posttrain.cli.request import read_request

    request = read_request(arguments, dialect, look_at_files=True, here=here, to_run=True)
    for line in [*remarks(request.loaded), *box_text(request.loaded.config)]:
        typer.echo(line, err=True)
    prepare(request.loaded.config)
    from posttrain.build import train_run  # imports torch, which reads the environment that prepare() has set

    try:
        train_run(request.loaded.config, allow_config_change=allow_config_change)
    except RequestError as error:  # seen only once the data and the model were read: say where in the user's file
        error.locate(request.loaded.locate)
        raise
