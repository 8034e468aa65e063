"""The first lines of a command that loads a model: torch takes seconds to import, and a terminal must not stay blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from posttrain.cli.process import prepare
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import RequestError
from posttrain.libraries.hub import settle_hub
from posttrain.plan.files import hub_models


def announce(text: str, *, err: bool = True) -> None:
    """Say what the command does now, by default on standard error."""
    typer.echo(f"{text} ...", err=err)


def announce_reading(arguments: Sequence[str]) -> None:
    """Say which configuration is read, at once."""
    named = next((argument for argument in arguments if "=" not in argument), "the command line")
    announce(f"reading {named}")


def get_ready(loaded: LoadedConfig[Any], *, err: bool = True) -> None:
    """Check that the models of the hub can be had, set up the process, and announce the import of torch.

    Raises: RequestError, with the user's file and line, for a model of the hub that cannot be had.
    """
    try:
        notes = settle_hub(hub_models(loaded.config))
    except RequestError as error:
        error.locate(loaded.locate)
        raise
    for note in notes:
        typer.echo(note, err=True)
    prepare(loaded.config)
    announce("loading torch", err=err)
