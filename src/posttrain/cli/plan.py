"""``posttrain plan``: explain a run, or report everything that is wrong with it. Never imports torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here
from posttrain.errors import RequestError

if TYPE_CHECKING:
    from posttrain.cli.verdict import Verdict
    from posttrain.dialects.loaded import LoadedConfig

# Module of each entry, which has check_request, plan_text and plan_json; with data, other_file_problems, too.
PLANS = {
    "train": "posttrain.cli.plan_text",
    "sft": "posttrain.cli.plan_sft",
    "tune": "posttrain.cli.plan_tune",
    "generate": "posttrain.cli.plan_generate",
    "evaluate": "posttrain.cli.plan_evaluate",
    "serve": "posttrain.cli.plan_plain",
}


def plan(
    arguments: Arguments = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    skip_files: Annotated[
        bool, typer.Option("--skip-files", help="Check the configuration only; data and model need not exist.")
    ] = False,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    fit: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=0.1,
            max=10_000,
            help="Find the method and sizes that fit into one device of so much memory.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE", help="Compute a step's seconds on 64x8xH100 (nodes x devices) or a machine file."
        ),
    ] = None,
    propose: Annotated[
        bool, typer.Option("--propose", help="With --on: find the placement whose steps take the fewest seconds.")
    ] = False,
) -> None:
    """Explain a run without starting it. The last line says whether it trains; one that does not exits with 2."""
    from posttrain.cli.verdict import refused

    if propose and on is None:
        raise RequestError("--propose needs a machine: --on 8xH100, or --on FILE")
    if fit is not None and on is not None:
        raise RequestError("--fit asks about one device and --on about a machine: ask one at a time")
    if fit is not None or on is not None:
        from posttrain.cli.request import load_request

        loaded = load_request(arguments or [], dialect, here=here, drop_unknown=drop_unknown, skip_files=skip_files)
        if fit is not None:
            from posttrain.cli.plan_fit import fit_text

            typer.echo(fit_text(loaded, fit))
            return
        from posttrain.cli.plan_on import on_text

        assert on is not None
        text, fits = on_text(loaded, on, search=propose, as_json=json)
        typer.echo(text)
        if not fits:
            raise typer.Exit(RequestError.exit_code)
        return
    try:
        trains = _plan_each(
            arguments or [], dialect, here=here, drop_unknown=drop_unknown, look=not skip_files, as_json=json
        )
    except RequestError as error:
        if json:
            typer.echo(dumps(refused(error.problems), indent=2))
        raise
    if not trains:
        raise typer.Exit(RequestError.exit_code)


def _plan_each(
    arguments: list[str], dialect: str | None, *, here: bool, drop_unknown: bool, look: bool, as_json: bool
) -> bool:
    """Print the plan, or those of all trainers that a launch script calls. Returns: True where all of them train.

    Raises: RequestError with the problems of all of them.
    """
    from posttrain.dialects.scripts.names import SeveralTrainers

    plan_one = partial(_plan, dialect=dialect, here=here, drop_unknown=drop_unknown, look=look, as_json=as_json)
    try:
        return plan_one(arguments)
    except SeveralTrainers as several:
        if as_json:
            raise
        names = several.names
    trains, problems = [], []
    for name in names:
        typer.echo(f"{name}\n")
        try:
            trains.append(plan_one([name, *arguments[1:]]))
        except RequestError as error:
            problems += [replace(problem, what=f"{name}: {problem.what}") for problem in error.problems]
        typer.echo("")
    if problems:
        raise RequestError(list(dict.fromkeys(problems)))
    return all(trains)


def _plan(
    arguments: list[str], dialect: str | None, *, here: bool, drop_unknown: bool, look: bool, as_json: bool
) -> bool:
    """Print the plan. Returns: True for a configuration that trains."""
    from posttrain.cli.request import load_request

    loaded = load_request(arguments, dialect, here=here, drop_unknown=drop_unknown, skip_files=not look)
    module, request, judged = planned(loaded, look_at_files=look)
    typer.echo(module.plan_json(request) if as_json else f"{module.plan_text(request)}\n\n{judged.text()}")
    return judged.trains


def planned(loaded: LoadedConfig[Any], *, look_at_files: bool) -> tuple[Any, Any, Verdict]:
    """Check a configuration and the files that are here; nothing is downloaded. Where a data set of the hub is not in its cache,
    the other files are checked. Returns: the module of its entry, the request for it, and whether it trains.

    Raises: RequestError with all problems.
    """
    from posttrain.cli.hub import with_cached_data
    from posttrain.cli.verdict import verdict
    from posttrain.plan.hub import local_data_problems

    module = import_module(PLANS[loaded.entry])
    if look_at_files:
        loaded, look_at_files = with_cached_data(loaded)
        if not look_at_files:
            found = loaded.further([*local_data_problems(loaded.config), *module.other_file_problems(loaded.config)])
            if found:
                raise RequestError(found)
    request = module.check_request(loaded, look_at_files=look_at_files)
    batches = getattr(request, "batches", None)
    return module, request, verdict(loaded, batches.devices if batches else None)
