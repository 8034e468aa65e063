"""The environment verl_loop: the trainer and the class that plays must be there, and need nothing that an episode lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.registry import ENV_CHECKS
from posttrain.verl_episodes import NotPlayable, find_loop


@ENV_CHECKS.register("verl_loop")
def verl_loop(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    folder, program = Path(str(settings.get("folder"))).expanduser(), settings.get("program")
    if not folder.is_dir():
        yield Problem(f"there is no folder {folder}", fix="name the fork's checkout", field=f"{field}.folder")
        return
    file, _, method = str(settings.get("trainer")).rpartition(":")
    owner, _, fit = method.partition(".")
    try:
        find_loop(Path(file).expanduser(), owner, fit, [folder], Path(str(program)).expanduser() if program else None)
    except NotPlayable as error:
        yield Problem(f"{settings.get('trainer')}: {error}", fix="write FILE:CLASS.METHOD", field=f"{field}.trainer")
    if program is not None and not Path(str(program)).expanduser().is_file():
        what = f"there is no file {program}"
        yield Problem(what, fix="name the program that builds the trainer", field=f"{field}.program")
