"""``posttrain translate``: the same run in posttrain's own words."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from posttrain.cli.plan import ARGUMENTS_HELP, DIALECT_HELP, HERE_HELP, PLANS
from posttrain.errors import ConfigError, Problem


def translate(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="FILE [KEY=VALUE]", help=ARGUMENTS_HELP)] = None,
    to: Annotated[str, typer.Option("--to", help="The dialect to write: native.")] = "native",
    dialect: Annotated[str | None, typer.Option(help=DIALECT_HELP)] = None,
    here: Annotated[bool, typer.Option("--here", help=HERE_HELP)] = False,
) -> None:
    """Print a configuration as a complete native YAML file. What was ignored goes to the error stream."""
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.request import load_request
    from posttrain.dialects.native.write import to_yaml

    if to != "native":
        raise ConfigError(Problem(f"a configuration cannot be written in {to!r}", fix="use --to native"))
    loaded = load_request(arguments or [], dialect, here=here)
    import_module(PLANS[loaded.entry]).check_request(loaded, look_at_files=False)
    for line in remarks(loaded):
        typer.echo(line, err=True)
    for problem in loaded.unsupported:
        typer.echo(f"planned, not built yet: {problem}", err=True)
    typer.echo(to_yaml(loaded.config), nl=False)
