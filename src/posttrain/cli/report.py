"""``posttrain report``: one HTML file comparing runs, or evaluations; or the same page, live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import Problem, RequestError


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, or of an evaluation.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[MORE]", help="Further runs, or evaluations, to compare.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default in the first folder.")] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page to this machine and keep it up to date, instead of writing it."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live: the port; 0 chooses a free one.")] = 0,
    push: Annotated[
        str | None,
        typer.Option(metavar="TRACKER", help="Send the run's missing steps to a tracker, instead of writing a file."),
    ] = None,
) -> None:
    """Write one offline HTML file with curves, samples and configurations of one or several runs."""
    folders = [folder, *(more or [])]
    _check(folders, out, live, port, push)
    if push is not None:
        typer.echo(f"sent {_push(push, folder)} steps to {push}")
        return
    from posttrain.report.evaluation import is_evaluation, write_evaluation_report
    from posttrain.report.html import write_report
    from posttrain.report.live import serve

    if live:
        serve(folders, port, typer.echo)
    elif all(map(is_evaluation, folders)):
        typer.echo(f"wrote {write_evaluation_report(folders, out)}")
    else:
        typer.echo(f"wrote {write_report(folders, out)}")
        for line in difference_lines(folders):
            typer.echo(line)


def difference_lines(folders: list[Path]) -> list[str]:
    """The settings in which runs differ, in colours unless NO_COLOR is set: red is the first run's value, green another's."""
    from posttrain.report.differences import differences
    from posttrain.report.read import read_run

    if len(folders) < 2 or not all(folder.is_dir() for folder in folders):
        return []
    rows = differences([read_run(folder).config for folder in folders])
    lines = [f"{len(rows)} settings differ:" if rows else "the configurations are the same"]
    for name, values in rows:
        shown = ["not set" if value is None else value for value in values]
        if not os.environ.get("NO_COLOR"):
            shown = [typer.style(value, fg="green" if n else "red") for n, value in enumerate(shown)]
        lines.append(f"  {name}: {' -> '.join(shown)}")
    return lines


def _check(folders: list[Path], out: Path | None, live: bool, port: int, push: str | None) -> None:
    """Raises: RequestError for options that exclude each other."""
    from posttrain.report.evaluation import is_evaluation

    problems = []
    if push is not None and (len(folders) > 1 or out is not None or live):
        problems.append(
            Problem("--push sends one run, and writes nothing", fix="leave out --out, --live and further runs")
        )
    elif live and out is not None:
        problems.append(Problem("--live writes no file", fix="leave out --out, or --live"))
    elif live and any(map(is_evaluation, folders)):
        problems.append(
            Problem("--live shows runs, and an evaluation is over when it is written", fix="leave out --live")
        )
    if port and not live:
        problems.append(Problem("--port is the port of the live page", fix="add --live, or leave out --port"))
    if problems:
        raise RequestError(problems)


def _push(name: str, folder: Path) -> int:
    from posttrain.config.tracking import SERVICES
    from posttrain.registry import TRACKERS
    from posttrain.report.read import read_run
    from posttrain.run import relay
    from posttrain.run.lock import only_trainer

    if name in TRACKERS.names() and name not in SERVICES:
        raise RequestError(
            Problem(f"{name} is not a tracker that receives steps", fix=f"use one of {', '.join(SERVICES)}")
        )
    service = TRACKERS.get(name)()
    read_run(folder)  # reports a folder that holds no run
    with only_trainer(folder):  # an active run sends its steps itself
        return relay.push(name, service, folder)
