"""A native YAML file and overrides become a LoadedConfig."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.config.reading.compose import compose
from posttrain.config.reading.validate import validate
from posttrain.config.shown import secret_warnings
from posttrain.dialects.entries import TRAIN, Entry
from posttrain.dialects.here import at_hand
from posttrain.dialects.loaded import LoadedConfig, expand_home
from posttrain.dialects.native.untranslated import take_out


def read(
    path: str | None, overrides: Sequence[str] = (), entry: Entry[Any] = TRAIN, *, here: bool = False
) -> LoadedConfig[Any]:
    """Load the file and the overrides, with all their problems in ``problems``. Its ``config`` is an
    ``entry.root``.

    An override of a key that the file leaves out needs no ``+``: every key of the schema has a value.

    Raises: ConfigError when there is nothing to speak of: an unreadable file, broken YAML, a broken override.
    """
    composed = compose(path, overrides)
    lost, misread = take_out(composed)
    config, problems = validate(composed.values, composed.sources, entry.root)
    problems += misread
    config = expand_home(config)
    changes: list[str] = []
    if here:
        config, changes = at_hand(config)
    config = config.with_references(composed.references)
    loaded = LoadedConfig(
        config=config,
        sources=composed.sources,
        dialect="native",
        entry=entry.name,
        warnings=() if problems else (*entry.warnings_of(config), *secret_warnings(config)),
        problems=tuple(problems),
        changes=tuple(changes),
    )
    # A default in the place of a wrong value may contradict what is written beside it
    wrong = re.compile(
        "|".join(rf"\b{re.escape(problem.field)}\b" for problem in problems if "." in problem.field) or "(?!)"
    )
    found = [one for one in entry.check(config) if not wrong.search(f"{one.what} {one.fix}")]
    return replace(
        loaded,
        problems=(*problems, *loaded.further(found)),
        unsupported=(*lost, *loaded.further(entry.unsupported(config))),
    )


def load(path: str | None, overrides: Sequence[str] = (), entry: Entry[Any] = TRAIN) -> LoadedConfig[Any]:
    """``read``, for who only wants a configuration that can be run.

    Raises: ConfigError with every problem.
    """
    return read(path, overrides, entry).runnable()
