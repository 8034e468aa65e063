"""``posttrain train``: check the request, then run reinforcement learning."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import (
    AllowConfigChange,
    Arguments,
    Dialect,
    DropUnknown,
    Here,
    Replay,
    Restarts,
    Standby,
    StartOver,
    SupervisedBy,
)
from posttrain.cli.supervised import Supervised
from posttrain.errors import RequestError


def train(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    allow_config_change: AllowConfigChange = False,
    start_over: StartOver = False,
    replay: Replay = None,
    restarts: Restarts = 0,
    supervised: SupervisedBy = None,
    standby: Standby = False,
) -> None:
    """Train a model with reinforcement learning."""
    if restarts:
        from posttrain.cli.restarts import supervise, without_restarts

        raise typer.Exit(supervise(without_restarts(sys.argv[1:]), restarts))
    with stopped_at_once():
        changes = {"allow_config_change": allow_config_change, "start_over": start_over}
        given = arguments or []
        if replay:
            given = replayed(replay, given)
        run = Supervised(supervised, waits=standby)
        _train(given, dialect, run, here=here, drop_unknown=drop_unknown, replay=replay, **changes)


def _train(
    arguments: list[str],
    dialect: str | None,
    run: Supervised,
    *,
    here: bool,
    drop_unknown: bool,
    allow_config_change: bool,
    start_over: bool,
    replay: Path | None,
) -> None:
    from posttrain.cli.beginning import announce, announce_reading, get_ready
    from posttrain.cli.box_text import box_text
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.request import read_request
    from posttrain.libraries.importing import importing

    with run.preparing():
        announce_reading(arguments)
        request = read_request(
            arguments, dialect, look_at_files=True, here=here, drop_unknown=drop_unknown, to_run=True
        )
        for line in [*remarks(request.loaded), *box_text(request.loaded.config)]:
            typer.echo(line, err=True)
        loaded = get_ready(request.loaded)
        # Imports torch, which reads the environment that get_ready() has set.
        with importing():
            from posttrain.build.train import train_run

        run.accelerated = may_be_accelerated(loaded.config.placement.device)

    with placed_by(loaded), run.told(loaded.config.folder):
        run.check(loaded.config.run.resume)
        train_run(
            loaded.config,
            allow_config_change=allow_config_change,
            start_over=start_over,
            say=announce,
            in_words=loaded.text,
            replay=replay,
        )


def may_be_accelerated(device: str) -> bool:
    """Return False where a run uses no accelerator: it is on a CPU, or torch was built for none."""
    import torch

    built_for = (torch.version.cuda, torch.version.hip, torch.version.xpu)
    return device != "cpu" and any(each is not None for each in built_for)


def replayed(run: Path, arguments: list[str]) -> list[str]:
    """The arguments of a run that replays another: its configuration, unless a file is named, and a folder of its own."""
    from posttrain.errors import Problem

    given = [*arguments]
    if not given or "=" in given[0]:
        given = [str(run / "config.yaml"), *given]
    folders = [each.partition("=")[2] for each in given if each.lstrip("+").startswith("run.folder=")]
    if folders and Path(folders[-1]).resolve() == run.resolve():
        what = f"run.folder={folders[-1]} is the run that is replayed"
        raise RequestError(Problem(what, fix="name another folder", field="run.folder"))
    elsewhere = [] if folders else [f"run.folder={run.resolve()}_replay"]
    return [*given, *elsewhere, "checkpoint.folder=null", "checkpoint.upload=null", "run.resume_path=null"]
