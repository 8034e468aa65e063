"""``posttrain schema``: the JSON schema of a native configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.errors import ConfigError, Problem, did_you_mean


def schema(
    entry: Annotated[
        str, typer.Option("--entry", help="The entry: train, sft, tune, generate, evaluate, serve.")
    ] = "train",
) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from posttrain.dialects.entries import ENTRIES
    from posttrain.dialects.native.write import json_schema

    if entry not in ENTRIES:
        raise ConfigError(Problem(f"there is no entry {entry!r}", fix=did_you_mean(entry, ENTRIES)))
    typer.echo(json_schema(ENTRIES[entry].root), nl=False)
