"""The environment roll_manager: its Python and its checkout must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS

PYTHON = "POSTTRAIN_ROLL_PYTHON"


@ENV_CHECKS.register("roll_manager")
def roll_manager(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    python = settings.get("python") or os.environ.get(PYTHON)
    if python:
        yield from program_problems([os.path.expanduser(python)], f"{field}.python")
    else:
        what = "a manager of ROLL's needs a Python that has ROLL, and none is named"
        fix = f"set {PYTHON}, or {field}.python: FOLDER/bin/python of the environment that it runs in"
        yield Problem(what, fix=fix, field=f"{field}.python")
    folder = settings.get("folder")
    if not isinstance(folder, str) or not (Path(folder) / "roll").is_dir():
        what = f"there is no package roll in {folder}"
        yield Problem(what, fix="name the checkout that has the manager", field=f"{field}.folder")
