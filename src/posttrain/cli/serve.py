"""``posttrain serve``: serve a model through an OpenAI-compatible endpoint."""

from __future__ import annotations

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments
from posttrain.errors import RequestError


def serve(arguments: Arguments = None) -> None:
    """Serve a model to OpenAI clients and record every response token by token."""
    with stopped_at_once():
        _serve(arguments or [])


def _serve(arguments: list[str]) -> None:
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.plan_plain import check_request, remarks
    from posttrain.cli.process import importing
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import SERVE
    from posttrain.plan.files import check_model_files

    loaded = check_request(load_request(arguments, "native", SERVE), look_at_files=True, to_run=True)
    if problems := loaded.locate(check_model_files(loaded.config.model)):
        raise RequestError(problems)
    for line in remarks(loaded):
        typer.echo(line, err=True)
    get_ready(loaded)
    # Imports torch, which reads the environment that get_ready() has set.
    with importing():
        from posttrain.build.serve import serve_run

    def on_ready(address: str, token: str, notes: list[str]) -> None:
        for note in notes:
            typer.echo(note)
        typer.echo(f"OPENAI_BASE_URL={address}")
        if token:
            typer.echo(f"OPENAI_API_KEY={token}")

    with placed_by(loaded):
        serve_run(loaded.config, on_ready=on_ready)
    typer.echo("stopped")
