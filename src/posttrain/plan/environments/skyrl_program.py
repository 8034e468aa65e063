"""The environment skyrl_program: its Python and its program must be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.programs import python_problems as own_python_problems
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
    return own_python_problems(settings, field, variable=PYTHON, what="a program on SkyRL", library="SkyRL")
