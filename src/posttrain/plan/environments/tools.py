"""The environment tools: its tools, their options, and the files, programs and classes that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.checks.settings import setting_problems
from posttrain.errors import Problem, nearest
from posttrain.plan.own_code import own_code_problems
from posttrain.plan.programs import program_problems
from posttrain.registry import ENV_CHECKS, TOOLS, is_installed, missing_library


@ENV_CHECKS.register("tools")
def tools(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    given = settings.get("tools")
    if given is not None and not given:
        known = ", ".join(TOOLS.names())
        yield Problem("tools is empty", fix=f"name some (known: {known})", field=f"{field}.tools")
    yield from tool_problems(given or (), f"{field}.tools")


def tool_problems(given: Any, field: str) -> Iterator[Problem]:
    """Yield the problems of a list of tools; values of another type are reported by the setting."""
    for index, entry in enumerate(given if isinstance(given, list) else ()):
        at = f"{field}.{index}"
        if isinstance(entry, str):
            yield from _tool_problems(entry, {}, at, at)
        elif isinstance(entry, Mapping):
            options = {name: value for name, value in entry.items() if name not in ("name", "schema")}
            yield from _tool_problems(str(entry.get("name", "")), options, at, f"{at}.name")


def _tool_problems(name: str, options: Mapping[str, Any], field: str, name_field: str) -> Iterator[Problem]:
    if ":" in name:
        yield from own_code_problems(
            name, options, field=name_field, settings=field, holds="your function, which returns a Tool", given=0
        )
        return
    if name not in TOOLS.names():
        yield TOOLS.problem(name, name_field)
        return
    wrong = list(setting_problems(f"the tool {name}", TOOLS.settings(name), options, field, word="option"))
    yield from wrong
    facts = TOOLS.facts(name)
    if facts.library and not is_installed(facts.library):
        problem = missing_library(facts.library, f"the tool {name}")
        yield Problem(problem.what, fix=problem.fix, field=name_field)
    found = {key: value for key, value in options.items() if value is not None and not wrong}
    for option in found.keys() & {*facts.files}:
        yield from _file_problems(str(found[option]), f"{field}.{option}")
    for option in found.keys() & {*facts.programs}:
        yield from program_problems(found[option], f"{field}.{option}")
    for option in found.keys() & {*facts.variables}:
        if not os.environ.get(found[option]):
            what = f"the environment variable {found[option]} is not set"
            yield Problem(what, fix="put the token into it", field=f"{field}.{option}")
    for option in found.keys() & {*facts.own_code}:
        at = f"{field}.{option}"
        yield from own_code_problems(
            found[option], ("config", "tool_schema"), field=at, settings=at, holds="your tool class", given=0
        )


def _file_problems(path: str, field: str) -> Iterator[Problem]:
    file = Path(path).expanduser()
    if file.is_file():
        return
    beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
    near = nearest(file.name, beside)
    yield Problem(f"there is no file {path}", fix=f"did you mean {file.with_name(near)}?" if near else "", field=field)
