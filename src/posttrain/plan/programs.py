"""Programs that a configuration names: found on this machine, not started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, nearest

# Programs whose first argument, unless it is an option, is the file that they run.
INTERPRETERS = ("python", "python3", "node", "bash", "sh", "ruby", "perl", "Rscript")


def program_problems(command: Any, field: str) -> Iterator[Problem]:
    """Yield the problems of a program and its arguments: neither it nor the file that it runs may be missing."""
    if not isinstance(command, list) or not command:
        yield Problem(
            f"{field} must be a list: a program and its arguments", fix="write [python, agent.py]", field=field
        )
        return
    program, *arguments = map(str, command)
    if shutil.which(program) is None:
        yield Problem(f"there is no program {program}", fix="install it, or name it by its path", field=field)
        return
    file = Path(arguments[0]) if arguments else Path()
    if Path(program).name in INTERPRETERS and file.suffix and not file.name.startswith("-") and not file.is_file():
        beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
        near = nearest(file.name, beside)
        yield Problem(
            f"there is no file {file}, which {program} is to run",
            fix=f"did you mean {file.with_name(near)}?" if near else "name an existing file",
            field=field,
        )


def python_problems(
    settings: Mapping[str, Any], field: str, *, variable: str, what: str, library: str
) -> Iterator[Problem]:
    """Report a Python of the user's own, named by the setting ``python`` or by a variable, that is not named, or not there."""
    python = settings.get("python") or os.environ.get(variable)
    if python:
        yield from program_problems([os.path.expanduser(python)], f"{field}.python")
    else:
        fix = f"set {field}.python: FOLDER/bin/python of the environment that it runs in, or {variable}"
        problem = f"{what} needs a Python that has {library}, and none is named"
        yield Problem(problem, fix=fix, field=f"{field}.python")
