"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE [KEY=VALUE]",
        help="A YAML file, or a launch script (run.sh), then overrides: policy.optimizer.lr=1e-5; "
        "for what a script leaves open, --set NAME=VALUE (--set 1=VALUE for its $1).",
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        help="Dialect of the file: native, verl, verl@0.2, verl@0.1, skyrl, skyrl@2025-08, roll. By default found by the keys."
    ),
]
Here = Annotated[
    bool,
    typer.Option(
        "--here", help="Run a cluster configuration on the single device of this machine; prints every change."
    ),
]
DropUnknown = Annotated[
    bool,
    typer.Option("--drop-unknown", help="Leave out keys that no version of the file's dialect has; prints every one."),
]
AllowConfigChange = Annotated[
    bool,
    typer.Option("--allow-config-change", help="Resume the run in run.folder although its settings have changed."),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RUN",
        help="Make the recorded decisions of an asynchronous run again, with its configuration, in the folder RUN_replay.",
    ),
]
StartOver = Annotated[
    bool,
    typer.Option(
        "--start-over",
        help="Begin at the first step where all checkpoints of the run are damaged or gone; its records are kept.",
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Start the run again after a crash, at most N times; not after the same error in the same step, or a wrong request.",
    ),
]
# Between cli.restarts and the runs that it starts: the descriptor of their socket, and that this one waits for its turn.
SupervisedBy = Annotated[int | None, typer.Option("--supervised", hidden=True)]
Standby = Annotated[bool, typer.Option("--standby", hidden=True)]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Of a run's configuration: where the results go. By default named after the run."),
]
Training = Annotated[
    bool,
    typer.Option(
        "--training",
        help="Of a run's configuration: its training rows and rollout sampling instead of the validation's.",
    ),
]
RowsPerPart = Annotated[
    int,
    typer.Option(
        min=1, help="Of a run's configuration: rows that are played and saved together; a stop loses one such part."
    ),
]
