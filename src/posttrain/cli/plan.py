"""``posttrain plan``: explain a run, or report everything that is wrong with it. Never imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here

# Module of each entry, which has check_request, plan_text and plan_json.
PLANS = {
    "train": "posttrain.cli.plan_text",
    "sft": "posttrain.cli.plan_sft",
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
) -> None:
    """Explain a run without starting it."""
    from posttrain.cli.request import load_request

    loaded = load_request(arguments or [], dialect, here=here, drop_unknown=drop_unknown)
    module = import_module(PLANS[loaded.entry])
    request = module.check_request(loaded, look_at_files=not skip_files)
    typer.echo(module.plan_json(request) if json else module.plan_text(request))
