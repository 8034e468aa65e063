"""Configurations for a program: those of the command line, in every dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.dialects.detect import read_config
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import ConfigError, Problem

Overrides = Sequence[str] | Mapping[str, Any]
LOAD = 'write posttrain.load("run.yaml", {"a.b": 1})'
OVERRIDES = 'write ["a.b=1"] or {"a.b": 1}'


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
    Raises: ConfigError for a file or an override that cannot be read, and for arguments of another type.
    """
    if not isinstance(path, str | Path | None):
        raise ConfigError(Problem(f"path is a file's, a text or a Path, not {_kind(path)}", fix=LOAD))
    if not isinstance(dialect, str | None):
        raise ConfigError(Problem(f"dialect is a name, not {_kind(dialect)}", fix='write dialect="verl"'))
    texts = as_overrides(overrides)
    file = None if path is None else str(path)
    if file is not None and (not file or "\0" in file):
        raise ConfigError(Problem(f"path is no file's name: {file!r}", fix=LOAD))
    return read_config(file, texts, dialect, here=here, drop_unknown=drop_unknown)


def as_overrides(overrides: Overrides | Any) -> list[str]:
    """Write keys with Python values as overrides in Hydra's grammar; texts stay.

    Raises: ConfigError for overrides of another type, and for a value that a configuration cannot hold.
    """
    if isinstance(overrides, Mapping):
        if names := [key for key in overrides if not isinstance(key, str)]:
            raise ConfigError(Problem(f"the key of an override is a text, not {_kind(names[0])}", fix=OVERRIDES))
        return [f"++{key}={_value(key, value)}" for key, value in overrides.items()]
    if not isinstance(overrides, list | tuple):
        raise ConfigError(Problem(f"overrides are a list of texts or a dict, not {_kind(overrides)}", fix=OVERRIDES))
    if others := [each for each in overrides if not isinstance(each, str)]:
        raise ConfigError(Problem(f"an override in a list is a text, not {_kind(others[0])}", fix=OVERRIDES))
    return list(overrides)


def _kind(value: Any) -> str:
    """The type and the value of an argument that is wrong, for an error."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _value(key: str, value: Any) -> str:
    """Write a value in Hydra's grammar: texts in quotes, so that nothing in them has a meaning."""
    match value:
        case None:
            return "null"
        case Mapping():
            return "{" + ",".join(f"{name}:{_value(key, inner)}" for name, inner in value.items()) + "}"
        case str() | Path():
            text = re.sub(r"(\\*)'", r"\1\1\'", str(value))
            return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
        case list() | tuple():
            return "[" + ",".join(_value(key, inner) for inner in value) + "]"
        case bool() | int() | float():
            return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
        case _:
            raise ConfigError(
                Problem(
                    f"an override cannot hold {_kind(value)}",
                    where=f"override {key}",
                    fix="write a number, a text, True, None, or a list or dict of these",
                )
            )
