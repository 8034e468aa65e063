"""The first lines of a command that loads a model: torch takes seconds to import, and a terminal must not stay blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from posttrain.cli.hub import with_hub_models
from posttrain.cli.process import prepare
from posttrain.dialects.loaded import LoadedConfig


def announce(text: str, *, err: bool = True) -> None:
    """Say what the command does now, by default on standard error."""
    typer.echo(f"{text} ...", err=err)


def announce_reading(arguments: Sequence[str]) -> None:
    """Say which configuration is read, at once."""
    named = next((argument for argument in arguments if "=" not in argument), "the command line")
    announce(f"reading {named}")


def get_ready(loaded: LoadedConfig[Any], *, err: bool = True) -> LoadedConfig[Any]:
    """Fetch the models of the hub, set up the process, and announce the import of torch.

    Returns: the configuration with the folders of these models. Raises: RequestError, with the user's file and line, for a
        model of the hub that cannot be had.
    """
    loaded = with_hub_models(loaded)
    prepare(loaded.config)
    announce("loading torch", err=err)
    return loaded
