"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE [KEY=VALUE]", help="A YAML file, then overrides: policy.optimizer.lr=1e-5."),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        help="Whose keys the file uses: native, verl, verl@0.2, skyrl, skyrl@2025-08, roll. Seen from the keys when not given."
    ),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="Run a cluster's configuration on the one device at hand; every change is printed."),
]
AllowConfigChange = Annotated[
    bool,
    typer.Option(
        "--allow-config-change", help="Go on with the run in run.folder although settings of it have changed."
    ),
]
