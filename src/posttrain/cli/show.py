"""``posttrain show``: browse a run's steps and samples in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import MissingDependency, Problem, RequestError
from posttrain.registry import is_installed, missing_library


def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Open the samples of this step directly.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="With --step: open the samples of its validation instead.")
    ] = False,
) -> None:
    """Browse a run in the terminal: steps, samples, rewards, and changes between validations."""
    if not is_installed("textual"):
        raise MissingDependency(missing_library("textual", "posttrain show"))
    if validation and step is None:
        raise RequestError(Problem("--validation says which samples of a step", fix="add --step N"))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fix = "run it in a terminal; posttrain report writes a file instead"
        raise RequestError(Problem("posttrain show needs a terminal for its input and output", fix=fix))
    from posttrain.cli.viewer.app import Kind, Viewer

    kind: Kind = "validation" if validation else "training"
    viewer = Viewer(run_folder, step, kind)
    if step is not None and step not in viewer.files(kind):
        there = sorted(viewer.files(kind))
        known = f"there are those of steps {there[0]} to {there[-1]}" if there else "there are none"
        raise RequestError(Problem(f"{run_folder} has no samples of a {kind} at step {step}", fix=known))
    viewer.run()
