"""The environment questions: its file with its columns, and its tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.plan.environments.tools import tool_problems
from posttrain.registry import ENV_CHECKS, ENVS


@ENV_CHECKS.register("questions")
def questions(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Read the file and fill the template; tools are looked at, and not started."""
    from posttrain.interfaces.env import EnvSpec

    yield from tool_problems(settings.get("tools") or (), f"{field}.tools")
    asked = {name: value for name, value in settings.items() if name != "tools"}
    try:
        ENVS.get("questions")(EnvSpec(name="questions", settings=asked), **asked)
    except RequestError as error:
        for problem in error.problems:
            yield replace(problem, field=".".join(filter(None, (field, problem.field))))
