"""The recorded decisions of a run, for one that makes them again with the settings that they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.asynchrony.script import Script, read_script
from posttrain.config import RunConfig
from posttrain.config.reading.compose import read_saved
from posttrain.errors import Problem, RequestError

# Of the section asynchronous: bounds of decisions, which a replay does not make by itself
_WITHOUT_EFFECT = ("wait_timeout_s", "prepared_groups", "max_running_groups")


def decisions_of(run: Path, config: RunConfig) -> Script:
    """Read the decisions of ``run``. Raises: RequestError when there are none, they cannot be followed, or ``config`` has other
    settings than they were made with."""
    script = read_script(run)
    file = run / "config.yaml"
    if file.is_file():
        recorded, _ = read_saved(str(file))
        if problems := list(_differences(recorded, config)):
            raise RequestError(problems)
    return script


def _differences(recorded: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    before, now = recorded.get("asynchronous", {}), config.asynchronous.model_dump()
    for name in sorted(now.keys() & before.keys() - {*_WITHOUT_EFFECT}):
        if now[name] != before[name]:
            yield Problem(
                f"the run that is replayed had asynchronous.{name} = {before[name]}, and this one has {now[name]}",
                fix=f"use asynchronous.{name}={before[name]}",
                field=f"asynchronous.{name}",
            )
    had, have = recorded.get("environment", {}).get("workers"), config.environment.workers
    if config.environment.used and have and had is not None and (have < had or not had):
        at_once = f"{had} at once" if had else "all in its own process"
        yield Problem(
            f"the run that is replayed had its environments {at_once}, and this one has {have} at once: one that finds no worker "
            "would be waited for while others wait for it",
            fix=f"use environment.workers={had}" + (" or more" if had else ""),
            field="environment.workers",
        )
