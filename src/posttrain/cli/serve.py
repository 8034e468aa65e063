"""``posttrain serve``: serve a model to OpenAI's clients, or to Tinker's."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.given_model import as_folder, check_given, is_run, names_model
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import Problem, RequestError


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL or FILE [KEY=VALUE]",
            help="A model folder, a run or checkpoint, a GGUF file or a hub id (org/name); or a YAML file. Then overrides.",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Another model that answers beside it, such as the one before training."),
    ] = None,
    api: Annotated[
        Literal["openai", "tinker"] | None,
        typer.Option(help="Interface (endpoint.api): openai samples and records, tinker also trains adapters."),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients and on a chat page, and record every response token by token; or to Tinker's clients,
    which train low-rank adapters over it with loops of their own (--api tinker)."""
    with stopped_at_once(), ExitStack() as folders:
        words = with_models(list(arguments or []), beside, folders)
        _serve([*words, *([] if api is None else [f"endpoint.api={api}"])])


def with_models(arguments: list[str], beside: str | None, folders: ExitStack) -> list[str]:
    """Return the arguments with the models of the command line as overrides, in the form of folders that can be served.

    The folders that are written for it are removed with ``folders``. Raises: RequestError for models that are not there, or
    named twice.
    """
    named = {}
    if arguments and names_model(arguments[0]):
        named["model.path"] = arguments.pop(0)
    if beside is not None:
        named["endpoint.beside"] = beside
    for key, word in named.items():
        check_given(word)
        if any(each.lstrip("+").startswith(f"{key}=") for each in arguments):
            raise RequestError(Problem(f"two models are named: {word} and {key}=...", fix="keep one"))
    as_given = [*arguments, *(f"{key}={json.dumps(word)}" for key, word in named.items())]
    if not any(is_run(word) or word.endswith(".gguf") for word in named.values()):
        return as_given
    from posttrain.cli.beginning import announce
    from posttrain.cli.process import prepare
    from posttrain.libraries.importing import importing

    prepare(_read(as_given).config)
    with importing():
        found = {key: as_folder(word, folders, announce, from_gguf=True) for key, word in named.items()}
    return [*arguments, *(f"{key}={json.dumps(folder)}" for key, folder in found.items())]


def _read(arguments: list[str]) -> LoadedConfig[Any]:
    """Read and check the configuration. Raises: RequestError with all problems of its keys."""
    from posttrain.cli.plan_plain import check_request
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import SERVE

    return check_request(load_request(arguments, "native", SERVE), look_at_files=True, to_run=True)


def _serve(arguments: list[str]) -> None:
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.plan_plain import remarks
    from posttrain.libraries.importing import importing
    from posttrain.plan.files import check_model_files
    from posttrain.plan.model_files import check_model

    loaded = _read(arguments)
    problems = check_model_files(loaded.config.model)
    if (other := loaded.config.endpoint.beside) is not None:
        problems += check_model(other, "endpoint.beside", tokenizer=loaded.config.model.tokenizer_path is None)
    if problems:
        raise RequestError(loaded.locate(problems))
    for line in remarks(loaded):
        typer.echo(line, err=True)
    loaded = get_ready(loaded)
    # Imports torch, which reads the environment that get_ready() has set.
    client = loaded.config.endpoint.api.upper()
    with importing():
        if client == "TINKER":
            from posttrain.build.serve_tinker import serve_run
        else:
            from posttrain.build.serve import serve_run

    def on_ready(address: str, token: str, notes: list[str]) -> None:
        for note in notes:
            typer.echo(note)
        typer.echo(f"{client}_BASE_URL={address}")
        if token:
            typer.echo(f"{client}_API_KEY={token}")

    with placed_by(loaded):
        serve_run(loaded.config, on_ready=on_ready)
    typer.echo("stopped")
