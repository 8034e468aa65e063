"""The environment agent: its function or its program must be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.own_code import own_code_problems
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS


@ENV_CHECKS.register("agent")
def agent(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    function, command = settings.get("function"), settings.get("command")
    if (function is None) == (command is None):
        what = "an agent is a function or a command, and " + (
            "neither is given" if command is None else "both are given"
        )
        yield Problem(what, fix=f"give {field}.function, or {field}.command", field=field)
        return
    if function is not None:
        options = settings.get("options") or {}
        yield from own_code_problems(
            function, options, field=f"{field}.function", settings=f"{field}.options", holds="your agent"
        )
    else:
        yield from program_problems(command, f"{field}.command")
