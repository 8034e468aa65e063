"""``posttrain train``: check everything, then run."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.plan import ARGUMENTS_HELP, DIALECT_HELP
from posttrain.errors import RequestError


def train(
    arguments: Annotated[list[str], typer.Argument(metavar="FILE [KEY=VALUE]", help=ARGUMENTS_HELP)],
    dialect: Annotated[str | None, typer.Option(help=DIALECT_HELP)] = None,
) -> None:
    """Train a model with reinforcement learning."""
    from posttrain.cli.process import prepare
    from posttrain.cli.request import read_request

    request = read_request(arguments, dialect, look_at_files=True)
    for warning in request.loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    prepare(request.loaded.config)
    from posttrain.build import train_run  # imports torch, which reads the environment that prepare() has set

    try:
        train_run(request.loaded.config)
    except RequestError as error:  # seen only once the data and the model were read: say where in the user's file
        error.locate(request.loaded.locate)
        raise
