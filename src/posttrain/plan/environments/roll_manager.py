"""The environment roll_manager: its Python and its checkout must be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.programs import python_problems
from posttrain.registry import ENV_CHECKS

PYTHON = "POSTTRAIN_ROLL_PYTHON"


@ENV_CHECKS.register("roll_manager")
def roll_manager(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    yield from python_problems(settings, field, variable=PYTHON, what="a manager of ROLL's", library="ROLL")
    folder = settings.get("folder")
    if not isinstance(folder, str) or not (Path(folder) / "roll").is_dir():
        what = f"there is no package roll in {folder}"
        yield Problem(what, fix="name the checkout that has the manager", field=f"{field}.folder")
