"""``posttrain translate``: write a run's configuration in the native dialect."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Annotated

import typer

from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here
from posttrain.cli.plan import PLANS
from posttrain.errors import ConfigError, Problem


def translate(
    arguments: Arguments = None,
    to: Annotated[str, typer.Option("--to", help="The dialect to write: native.")] = "native",
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
) -> None:
    """Print a configuration as a complete native YAML file. Ignored keys are reported on the error stream; what cannot be said in
    native keys stands in the file, which does not train before it is settled."""
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import schema_line
    from posttrain.dialects.native.write import to_yaml

    if to != "native":
        raise ConfigError(Problem(f"a configuration cannot be written in {to!r}", fix="use --to native"))
    loaded = load_request(arguments or [], dialect, here=here, drop_unknown=drop_unknown)
    lost = [problem for problem in (*loaded.problems, *loaded.unsupported) if not problem.library]
    if all(problem.refused for problem in loaded.problems):
        loaded = replace(loaded, problems=())
    import_module(PLANS[loaded.entry]).check_request(loaded, look_at_files=False)
    for line in remarks(loaded):
        typer.echo(line, err=True)
    for problem in lost:
        typer.echo(f"not translated: {problem}", err=True)
    typer.echo(schema_line(loaded.entry) + to_yaml(loaded.config, lost), nl=False)
