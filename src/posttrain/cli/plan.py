"""``posttrain plan``: say what a run would do, or everything that is wrong with it. Never imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

ARGUMENTS_HELP = "A YAML file, then overrides: policy.optimizer.lr=1e-5."
DIALECT_HELP = (
    "Whose keys the file uses: native, verl, verl@0.2, skyrl, skyrl@2025-08, roll. Seen from the keys when not given."
)
HERE_HELP = "Run a cluster's configuration on the one device at hand; every change is printed."
# Where each entry has check_request, plan_text and plan_json.
PLANS = {
    "train": "posttrain.cli.plan_text",
    "sft": "posttrain.cli.plan_sft",
    "generate": "posttrain.cli.plan_generate",
    "evaluate": "posttrain.cli.plan_evaluate",
}


def plan(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="FILE [KEY=VALUE]", help=ARGUMENTS_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    skip_files: Annotated[
        bool, typer.Option("--skip-files", help="Check the configuration alone; data and model need not exist.")
    ] = False,
    dialect: Annotated[str | None, typer.Option(help=DIALECT_HELP)] = None,
    here: Annotated[bool, typer.Option("--here", help=HERE_HELP)] = False,
) -> None:
    """Explain what a run would do, without starting it."""
    from posttrain.cli.request import load_request

    loaded = load_request(arguments or [], dialect, here=here)
    module = import_module(PLANS[loaded.entry])
    request = module.check_request(loaded, look_at_files=not skip_files)
    typer.echo(module.plan_json(request) if json else module.plan_text(request))
