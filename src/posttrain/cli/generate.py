"""``posttrain generate``: sample responses to a file of prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here


def generate(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again, replacing existing output.")] = False,
) -> None:
    """Sample responses to the prompts of a file."""
    with stopped_at_once("stopped at once; finished rows are kept"):
        _generate(arguments or [], dialect, here=here, drop_unknown=drop_unknown, overwrite=overwrite)


def _generate(arguments: list[str], dialect: str | None, *, here: bool, drop_unknown: bool, overwrite: bool) -> None:
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.plan_generate import check_request
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.progress import WorkProgress
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import GENERATE

    loaded = check_request(
        load_request(arguments, dialect, GENERATE, here=here, drop_unknown=drop_unknown),
        look_at_files=True,
        to_run=True,
    ).loaded
    for line in remarks(loaded):
        typer.echo(line, err=True)
    get_ready(loaded, err=False)
    # Imports torch, which reads the environment that get_ready() has set
    from posttrain.build.generate import generate_run

    with WorkProgress("generate", unit="rows", detail="tokens") as progress:

        def on_plan(rows: int, done: int, notes: list[str]) -> None:
            for note in notes:
                typer.echo(note)
            if 0 < done < rows:
                typer.echo(f"resuming after {done} of {rows} rows")
            progress.begin(rows, done)

        with placed_by(loaded):
            wrote = generate_run(loaded.config, overwrite=overwrite, on_plan=on_plan, on_work=progress.advance)
    if wrote:
        typer.echo(f"wrote {loaded.config.output.file}")
