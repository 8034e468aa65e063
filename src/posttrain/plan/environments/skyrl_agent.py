"""The environment skyrl_agent: its Python, the package and the task's file must be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.environments.skyrl_program import python_problems
from posttrain.registry import ENV_CHECKS


@ENV_CHECKS.register("skyrl_agent")
def skyrl_agent(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    yield from python_problems(settings, field)
    folder, task = (Path(str(settings.get(name))).expanduser() for name in ("folder", "task"))
    if not (folder / "skyrl_agent/__init__.py").is_file():
        what = f"there is no package skyrl_agent in {folder}"
        yield Problem(what, fix="name the folder that holds it", field=f"{field}.folder")
    elif not task.is_file() and not (folder / task).is_file():
        yield Problem(f"there is no file {task}", fix="name the task's file", field=f"{field}.task")
