"""``posttrain report``: one HTML file about a run, or about evaluations side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import Problem, RequestError


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, or of an evaluation.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[MORE]", help="Further evaluations, to stand beside the first.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default into the run folder.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="TRACKER", help="Instead, send a tracker the steps of the run that it lacks.")
    ] = None,
) -> None:
    """Write one offline HTML file with a run's curves, samples and configuration."""
    if push is not None:
        typer.echo(f"sent {_push(push, run_folder)} steps to {push}")
        return
    from posttrain.report.evaluation import is_evaluation, write_evaluation_report
    from posttrain.report.html import write_report

    if more or is_evaluation(run_folder):
        typer.echo(f"wrote {write_evaluation_report([run_folder, *(more or [])], out)}")
        return
    typer.echo(f"wrote {write_report(run_folder, out)}")


def _push(name: str, folder: Path) -> int:
    from posttrain.dialects.metric_names import SERVICES
    from posttrain.loops import relay
    from posttrain.registry import TRACKERS
    from posttrain.report.read import read_run
    from posttrain.stages.lock import only_trainer

    if name in TRACKERS.names() and name not in SERVICES:
        raise RequestError(
            Problem(f"{name} is nothing that steps are sent to", fix=f"use one of {', '.join(SERVICES)}")
        )
    service = TRACKERS.get(name)()
    read_run(folder)  # says what is wrong with a folder that holds no run
    with only_trainer(folder):  # a run that is going on sends its steps itself
        return relay.push(name, service, folder)
