"""The environment verifiers: its Python, and a file that is named, must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.libraries.prime_rl import sources
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS

PYTHON = "POSTTRAIN_VERIFIERS_PYTHON"


@ENV_CHECKS.register("verifiers")
def verifiers(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    python, env = settings.get("python") or os.environ.get(PYTHON), settings.get("env", "")
    if python:
        yield from program_problems([os.path.expanduser(python)], f"{field}.python")
    else:
        what = "verifiers needs a Python of its own, and none is named"
        fix = f"python -m venv FOLDER, install verifiers in it, and set {field}.python: FOLDER/bin/python, or {PYTHON}"
        yield Problem(what, fix=fix, field=f"{field}.python")
    if not isinstance(env, (str, Mapping)):
        yield Problem("env is no name and no block", fix="give the id of an environment", field=f"{field}.env")
        return
    try:
        found = sources(env, settings.get("source"), settings.get("options") or {})
    except ConfigError as error:
        for problem in error.problems:
            yield replace(problem, field=f"{field}.{problem.field}")
        return
    played = [found.training.env, found.validation.env]
    for name in dict.fromkeys(each if isinstance(each, str) else str(each["taskset"]["id"]) for each in played):
        path = Path(name).expanduser()
        if name.endswith(".py") and not path.is_file():
            yield Problem(f"there is no file {name}", fix="name a file with an environment", field=f"{field}.env")
        elif name.startswith((".", "/", "~")) and not path.exists():
            yield Problem(f"there is no folder {name}", fix="name a folder with an environment", field=f"{field}.env")
