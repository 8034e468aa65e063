"""The way of the commands that train on a file of texts or preferences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from posttrain.cli.errors import placed_by
from posttrain.dialects.entries import Entry
from posttrain.dialects.loaded import LoadedConfig

# The configuration, with what is to be done with an earlier run of its folder -> the run's folder.
RunOf = Callable[..., Path]


def train_on_files(
    arguments: list[str],
    dialect: str | None,
    entry: Entry[Any],
    checked: Callable[[LoadedConfig[Any]], LoadedConfig[Any]],
    import_run: Callable[[], RunOf],
    *,
    here: bool,
    drop_unknown: bool,
    **about_the_folder: bool,
) -> None:
    """Check the request and run it.

    Args: ``checked`` raises RequestError for what cannot run; ``import_run`` imports torch with the function that runs it.
    """
    from posttrain.cli.beginning import announce, announce_reading, get_ready
    from posttrain.cli.hub import with_hub_data
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.request import load_request
    from posttrain.libraries.importing import importing

    announce_reading(arguments)
    loaded = checked(with_hub_data(load_request(arguments, dialect, entry, here=here, drop_unknown=drop_unknown)))
    for line in remarks(loaded):
        typer.echo(line, err=True)
    loaded = get_ready(loaded)
    # Imports torch, which reads the environment that get_ready() has set.
    with importing():
        run = import_run()
    with placed_by(loaded):
        run(loaded.config, **about_the_folder, say=announce, in_words=loaded.text)
