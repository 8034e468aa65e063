"""The hub's models and data sets of a command: downloaded before they are read, at the commits of the run that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import RequestError
from posttrain.libraries.hub_names import HubName, model_name
from posttrain.plan.files import hub_models
from posttrain.plan.hub import hub_data, replace_data, replace_models

PREFIX = "run.hub_commits."


def with_hub_data(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """Put files of the hub's cache, downloaded where they are missing, in the place of data sets of the hub.

    Raises: RequestError with the user's places, for what is wrong with the configuration before anything is downloaded.
    """
    if not hub_data(loaded.config) or loaded.problems or loaded.unsupported:
        return loaded
    from posttrain.libraries.hub import fetch_data

    return _located(loaded, lambda commits: replace_data(loaded.config, commits.of(fetch_data, "paths")))


def with_hub_models(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """Put folders of the hub's cache, downloaded where they are missing, in the place of models of the hub.

    Raises: RequestError with the user's places.
    """
    if not hub_models(loaded.config):
        return loaded
    from posttrain.libraries.hub import fetch_model

    def fetch(wanted: HubName, field: str, commit: str) -> Any:
        typer.echo(f"fetching {wanted.title} ...", err=True)
        return fetch_model(wanted, field, commit, weights=not field.endswith("tokenizer_path"))

    return _located(loaded, lambda commits: replace_models(loaded.config, commits.of(fetch, "place")))


def with_cached_data(loaded: LoadedConfig[Any]) -> tuple[LoadedConfig[Any], bool]:
    """The same for a plan, which opens no connection. Returns: the configuration, and False where a data set is not in the
    cache, so that its rows cannot be looked at; a warning reports it."""
    names = hub_data(loaded.config)
    if not names or loaded.problems:
        return loaded, True
    from posttrain.libraries.hub import cached_data

    try:
        return _located(loaded, lambda commits: replace_data(loaded.config, commits.of(cached_data, "paths"))), True
    except RequestError:
        first = next(iter(names.values()))[0]
        what = (
            f"{first.title} is not in the cache of the hub, and a plan downloads nothing: its rows were not looked at"
        )
        return loaded.warned([f"{what}; {first.command} fetches it"]), False


def hub_folder(path: str, field: str, *, weights: bool = True) -> str:
    """The folder of a model that an argument names: in the hub's cache where it names one of the hub, downloaded if missing.

    Args: weights, False where its other files are enough. Raises: ModelError.
    """
    wanted = model_name(path)
    if wanted is None:
        return path
    from posttrain.libraries.hub import fetch_model

    fetched = fetch_model(wanted, field, weights=weights)
    if fetched.note:
        typer.echo(fetched.note, err=True)
    return fetched.place


class _Commits:
    """The commits that a command takes from the hub: those of its configuration, then those of the run that goes on."""

    def __init__(self, config: Any):
        self._given: Mapping[str, str] = {**_earlier(config), **getattr(config.run, "hub_commits", {})}
        self.taken: dict[str, str] = {}

    def of(self, fetch: Any, part: str) -> Any:
        """A function that fetches a name for a field and returns a part of what was fetched."""

        def fetched(wanted: HubName, field: str) -> Any:
            found = fetch(wanted, field, self._given.get(wanted.key, ""))
            self.taken[wanted.key] = found.commit
            if found.note:
                typer.echo(found.note, err=True)
            return getattr(found, part)

        return fetched


def _located(loaded: LoadedConfig[Any], change: Any) -> LoadedConfig[Any]:
    commits = _Commits(loaded.config)
    try:
        config = change(commits)
    except RequestError as error:
        error.locate(loaded.locate)
        raise
    if hasattr(config.run, "hub_commits"):
        run = config.run.model_copy(update={"hub_commits": {**config.run.hub_commits, **commits.taken}})
        config = config.model_copy(update={"run": run})
    return replace(loaded, config=config)


def _earlier(config: Any) -> dict[str, str]:
    """run.hub_commits of the run in this one's folder, or of the one whose checkpoint it starts from."""
    if not hasattr(config.run, "hub_commits"):
        return {}
    from posttrain.libraries.remote import is_url
    from posttrain.run.last_run import last_run, run_of_origin

    folder = Path(config.folder)
    runs = [last_run(folder, Path(config.checkpoint.folder or folder / "checkpoints"))]
    start = config.run.resume_path
    if start is not None and not is_url(start) and (origin := run_of_origin(Path(start).expanduser())):
        runs.insert(0, origin)
    said = {key: value for run in runs for key, value in run.config.items()}
    return {key.removeprefix(PREFIX): str(value) for key, value in said.items() if key.startswith(PREFIX)}
