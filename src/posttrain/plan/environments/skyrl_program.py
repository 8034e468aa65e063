"""The environment skyrl_program: its Python and its program must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS

PYTHON = "POSTTRAIN_SKYRL_PYTHON"


@ENV_CHECKS.register("skyrl_program")
def skyrl_program(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    yield from python_problems(settings, field)
    for name, there in (("file", Path.is_file), ("folder", Path.is_dir)):
        path = settings.get(name)
        if not isinstance(path, str) or not there(Path(path).expanduser()):
            yield Problem(f"there is no {name} {path}", fix=f"name the program's {name}", field=f"{field}.{name}")


def python_problems(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Report a Python with SkyRL that is not named, or not there."""
    python = settings.get("python") or os.environ.get(PYTHON)
    if python:
        yield from program_problems([os.path.expanduser(python)], f"{field}.python")
    else:
        what = "a program on SkyRL needs a Python that has SkyRL, and none is named"
        fix = f"set {field}.python: FOLDER/bin/python of the environment that it runs in, or {PYTHON}"
        yield Problem(what, fix=fix, field=f"{field}.python")
