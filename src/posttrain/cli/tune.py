"""``posttrain tune``: check the request, then tune on preferences, or train a reward model."""

from __future__ import annotations

import typer

from posttrain.cli.options import AllowConfigChange, Arguments, Dialect, DropUnknown, Here, StartOver
from posttrain.errors import RequestError


def tune(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    allow_config_change: AllowConfigChange = False,
    start_over: StartOver = False,
) -> None:
    """Train a model on preferences in a file (DPO, KTO, ORPO, SimPO), or a reward model."""
    try:
        changes = {"allow_config_change": allow_config_change, "start_over": start_over}
        _tune(arguments or [], dialect, here=here, drop_unknown=drop_unknown, **changes)
    except KeyboardInterrupt:  # a second signal, or one before the first step
        typer.echo("posttrain: stopped at once", err=True)
        raise typer.Exit(130) from None


def _tune(
    arguments: list[str],
    dialect: str | None,
    *,
    here: bool,
    drop_unknown: bool,
    allow_config_change: bool,
    start_over: bool,
) -> None:
    from posttrain.cli.beginning import announce, announce_reading, get_ready
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.plan_tune import check_request
    from posttrain.cli.process import importing
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import TUNE

    announce_reading(arguments)
    loaded = load_request(arguments, dialect, TUNE, here=here, drop_unknown=drop_unknown)
    loaded = check_request(loaded, look_at_files=True, to_run=True).loaded
    for line in remarks(loaded):
        typer.echo(line, err=True)
    get_ready(loaded)
    # Imports torch, which reads the environment that get_ready() has set.
    with importing():
        from posttrain.build.tune import tune_run

    try:
        tune_run(loaded.config, allow_config_change=allow_config_change, start_over=start_over, say=announce)
    except RequestError as error:  # found only while reading data and model: add the place in the user's file
        error.locate(loaded.locate)
        raise
