"""The environment verifiers: its Python, and a file that is named, must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS

PYTHON = "POSTTRAIN_VERIFIERS_PYTHON"


@ENV_CHECKS.register("verifiers")
def verifiers(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    python, env = settings.get("python") or os.environ.get(PYTHON), str(settings.get("env", ""))
    if python:
        yield from program_problems([os.path.expanduser(python)], f"{field}.python")
    else:
        what = "verifiers needs a Python of its own, and none is named"
        fix = f"python -m venv FOLDER, install verifiers in it, and set {field}.python: FOLDER/bin/python, or {PYTHON}"
        yield Problem(what, fix=fix, field=f"{field}.python")
    path = Path(env).expanduser()
    if env.endswith(".py") and not path.is_file():
        yield Problem(f"there is no file {env}", fix="name a file with load_environment", field=f"{field}.env")
    elif "/" in env and (env.startswith((".", "/", "~")) and not path.exists()):
        yield Problem(f"there is no folder {env}", fix="name a folder with load_environment", field=f"{field}.env")
