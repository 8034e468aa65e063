"""A run explained before it starts, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.api.configs import Overrides, load
from posttrain.cli.plan import planned
from posttrain.config import RunConfig, SftConfig, TuneConfig
from posttrain.config.reading.sources import SourceMap
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import ConfigError, Problem

Configuration = str | Path | LoadedConfig[Any] | RunConfig | SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of ``posttrain plan``; printed, it is the command's text."""

    trains: bool  # False where something in it is planned or refused
    text: str
    values: Mapping[str, Any] = field(repr=False)  # of ``posttrain plan --json``

    def __str__(self) -> str:
        return self.text


def plan(configuration: Configuration, overrides: Overrides = (), *, look_at_files: bool = True) -> Plan:
    """Explain a run without starting it: sizes of every batch, devices, memory, and whether it trains. Loads no torch.

    Args: ``configuration``, a path, the result of ``load``, or a RunConfig or SftConfig; ``overrides`` as in ``load``, for a
        path; without ``look_at_files`` data and model need not exist.
    Raises: RequestError with all problems.
    """
    loaded = loaded_of(configuration, overrides)
    module, request, judged = planned(loaded, look_at_files=look_at_files)
    text = f"{module.plan_text(request)}\n\n{judged.text()}"
    return Plan(trains=judged.trains, text=text, values=json.loads(module.plan_json(request)))


def loaded_of(configuration: Configuration, overrides: Overrides = ()) -> LoadedConfig[Any]:
    """Read what may be a path. Raises: ConfigError, also for overrides of what is already read, and for another type."""
    if isinstance(configuration, str | Path):
        return load(configuration, overrides)
    if overrides:
        fix = "give them to posttrain.load, or use config.model_copy"
        raise ConfigError(Problem("overrides change a file that is read here, not a configuration", fix=fix))
    if isinstance(configuration, LoadedConfig):
        return configuration
    kinds: dict[type, str] = {TuneConfig: "tune", SftConfig: "sft", RunConfig: "train"}
    entry = next((name for kind, name in kinds.items() if isinstance(configuration, kind)), None)
    if entry is None:
        what = f"a configuration is a file's path or what posttrain.load returns, not {type(configuration).__name__}"
        raise ConfigError(Problem(what, fix='write "run.yaml", or posttrain.load("run.yaml", {"a.b": 1})'))
    return LoadedConfig(config=configuration, sources=SourceMap(None, {}), dialect="native", entry=entry)
