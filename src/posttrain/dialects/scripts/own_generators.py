"""Generators of a program's own on SkyRL, which the environment skyrl_program calls in a Python that has SkyRL."""

from __future__ import annotations

from pathlib import Path

from posttrain.libraries.skyrl_names import ROWS

_ENVIRONMENT = "+posttrain.environment"
_ROWS = (
    "+posttrain.data.dataset_class_file='pkg://posttrain.envs.skyrl_program.rows'",
    f"+posttrain.data.dataset_class_name={ROWS}",
)


def overrides_of(file: Path, word: str, *, reads_rows: bool) -> list[str]:
    """Return the overrides that let a program play, and with ``reads_rows`` read the rows. ``word`` names it in the command:
    a.b.c, or a/b/c.py."""
    # Modules of a package import each other by its name: python -m a.b.c is started in the folder that holds a
    folder = file.parent if word.endswith(".py") else file.parents[word.count(".")]
    return [
        f"{_ENVIRONMENT}.name=skyrl_program",
        f"{_ENVIRONMENT}.settings.file='{file}'",
        f"{_ENVIRONMENT}.settings.folder='{folder}'",
        *(_ROWS if reads_rows else ()),
    ]
