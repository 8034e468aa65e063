"""``posttrain report``: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default into the run folder.")] = None,
) -> None:
    """Write one offline HTML file with a run's curves, samples and configuration."""
    from posttrain.report.html import write_report

    typer.echo(f"wrote {write_report(run_folder, out)}")
