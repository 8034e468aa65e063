"""``posttrain sft``: check everything, then learn the texts of a file."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.plan import ARGUMENTS_HELP, DIALECT_HELP, HERE_HELP
from posttrain.errors import RequestError


def sft(
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
    """Train a model on responses that are in a file (supervised fine-tuning)."""
    try:
        _sft(arguments or [], dialect, here=here, allow_config_change=allow_config_change)
    except KeyboardInterrupt:  # a second signal, or one before the first step
        typer.echo("posttrain: stopped at once", err=True)
        raise typer.Exit(130) from None


def _sft(arguments: list[str], dialect: str | None, *, here: bool, allow_config_change: bool) -> None:
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.plan_sft import check_request
    from posttrain.cli.process import prepare
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import SFT

    loaded = check_request(load_request(arguments, dialect, SFT, here=here), look_at_files=True, to_run=True).loaded
    for line in remarks(loaded):
        typer.echo(line, err=True)
    prepare(loaded.config)
    from posttrain.build_sft import sft_run  # imports torch, which reads the environment that prepare() has set

    try:
        sft_run(loaded.config, allow_config_change=allow_config_change)
    except RequestError as error:  # seen only once the data and the model were read: say where in the user's file
        error.locate(loaded.locate)
        raise
