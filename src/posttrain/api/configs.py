"""Configurations for a program: those of the command line, in every dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.dialects.detect import read_config
from posttrain.dialects.loaded import LoadedConfig

Overrides = Sequence[str] | Mapping[str, Any]


def load(
    path: str | Path | None = None,
    overrides: Overrides = (),
    *,
    dialect: str | None = None,
    here: bool = False,
    drop_unknown: bool = False,
) -> LoadedConfig[Any]:
    """Read a configuration of any dialect: ``load("run.yaml", {"policy.optimizer.lr": 1e-6})``.

    Args: ``path`` of a YAML file, or the name of one that a peer ships (``ppo_trainer``); None starts from our defaults.
        ``overrides`` are texts as on the command line (``"a.b=1"``), or keys with Python values. ``dialect`` and ``here``, as
        the options of the same names: ``here`` moves a cluster's configuration to one device. ``drop_unknown`` leaves out
        keys that no version of the dialect has.
    Returns: the configuration with the user's words for it. ``.config`` holds the values; ``.problems`` what is wrong with
        single keys: ``plan`` and ``train`` raise all of them together with what they find themselves.
    Raises: ConfigError for a file or an override that cannot be read.
    """
    texts = as_overrides(overrides)
    file = None if path is None else str(path)
    return read_config(file, texts, dialect, here=here, drop_unknown=drop_unknown)


def as_overrides(overrides: Overrides) -> list[str]:
    """Write keys with Python values as overrides in Hydra's grammar; texts stay."""
    if isinstance(overrides, str):
        raise TypeError('overrides are a list of texts, ["a.b=1"], or a dict, {"a.b": 1}')
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"++{key}={_value(value)}" for key, value in overrides.items()]


def _value(value: Any) -> str:
    """Write a value in Hydra's grammar: texts in quotes, so that nothing in them has a meaning."""
    match value:
        case None:
            return "null"
        case Mapping():
            return "{" + ",".join(f"{key}:{_value(inner)}" for key, inner in value.items()) + "}"
        case str() | Path():
            text = re.sub(r"(\\*)'", r"\1\1\'", str(value))
            return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
        case list() | tuple():
            return "[" + ",".join(map(_value, value)) + "]"
        case bool() | int() | float():
            return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
        case _:
            raise TypeError(f"an override cannot hold a value of type {type(value).__name__}: {value!r}")
