"""The environment agent_loop: its class must be there, with a method run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.plan.own_code import find, method_problems, own_code_problems
from posttrain.registry import ENV_CHECKS


@ENV_CHECKS.register("agent_loop")
def agent_loop(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    where, at = settings.get("class_name"), f"{field}.class_name"
    if not isinstance(where, str):
        return  # reported as a setting
    if (root := settings.get("root")) is not None and ":" not in where:
        module, _, name = where.rpartition(".")
        below = Path(str(root)).expanduser().joinpath(*module.split("."))
        where = f"{next((file for file in (below.with_suffix('.py'), below / '__init__.py') if file.is_file()), below)}:{name}"
    wrong = list(own_code_problems(where, (), field=at, settings=at, holds="your agent loop"))
    yield from wrong
    if not wrong:
        try:
            own = find(where, holds="your agent loop")
        except RequestError:
            return
        yield from method_problems(own, ("run",), field=at)
