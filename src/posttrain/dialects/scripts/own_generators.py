"""Generators of a program's own on SkyRL, which the environment skyrl_program calls in a Python that has SkyRL."""

from __future__ import annotations

from pathlib import Path

INSTEAD = (
    "write a parquet file with a row for each task, and leave get_train_dataset out; or let the generator play against the run's "
    "own endpoint (docs/open-run.md)"
)
_ENVIRONMENT = "+posttrain.environment"


def overrides_of(file: Path, word: str) -> list[str]:
    """Return the overrides that let a program play. ``word`` names it in the command: a.b.c, or a/b/c.py."""
    # Modules of a package import each other by its name: python -m a.b.c is started in the folder that holds a
    folder = file.parent if word.endswith(".py") else file.parents[word.count(".")]
    return [
        f"{_ENVIRONMENT}.name=skyrl_program",
        f"{_ENVIRONMENT}.settings.file='{file}'",
        f"{_ENVIRONMENT}.settings.folder='{folder}'",
    ]
