"""A native YAML file and overrides become a LoadedConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.dialects.checks import check, unbuilt, warnings_of
from posttrain.dialects.compose import compose
from posttrain.dialects.here import at_hand
from posttrain.dialects.loaded import LoadedConfig, expand_home
from posttrain.dialects.native.validate import validate


def read(path: str | None, overrides: Sequence[str] = (), *, here: bool = False) -> LoadedConfig:
    """What the file and the overrides say, and everything that is wrong with it, in ``problems``.

    An override of a key that the file leaves out needs no ``+``: every key of the schema has a value.

    Raises: ConfigError when there is nothing to speak of: an unreadable file, broken YAML, a broken override.
    """
    composed = compose(path, overrides)
    config, problems = validate(composed.values, composed.sources)
    config = expand_home(config)
    changes: list[str] = []
    if here:
        config, changes = at_hand(config)
    loaded = LoadedConfig(
        config=config,
        sources=composed.sources,
        dialect="native",
        warnings=() if problems else tuple(warnings_of(config)),
        problems=tuple(problems),
        changes=tuple(changes),
    )
    return replace(
        loaded,
        problems=(*problems, *loaded.further(check(config))),
        unsupported=tuple(loaded.further(unbuilt(config))),
    )


def load(path: str | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """``read``, for who only wants a configuration that can be run.

    Raises: ConfigError with every problem.
    """
    return read(path, overrides).runnable()
