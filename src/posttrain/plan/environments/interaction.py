"""The environment interaction: its classes must be there, and its tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.errors import Problem, RequestError, did_you_mean
from posttrain.plan.environments.tools import tool_problems
from posttrain.plan.own_code import find, method_problems, own_code_problems
from posttrain.registry import ENV_CHECKS

BUILT_IN = "gsm8k"
KEYS = ("name", "class_name", "config")


@ENV_CHECKS.register("interaction")
def interaction(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    given = settings.get("interactions")
    for index, each in enumerate(given if isinstance(given, list) else ()):
        if isinstance(each, Mapping):
            yield from _class_problems(each, f"{field}.interactions.{index}")
    yield from tool_problems(settings.get("tools") or (), f"{field}.tools")


def _class_problems(given: Mapping[str, Any], field: str) -> Iterator[Problem]:
    for key in given:
        if key not in KEYS:
            what = f"an interaction has no {key!r} (known: {', '.join(KEYS)})"
            yield Problem(what, fix=did_you_mean(key, KEYS, listed=True), field=f"{field}.{key}")
    where = given.get("class_name")
    if not isinstance(where, str):
        what = "an interaction needs a class_name"
        yield Problem(what, fix=f"write package.module.Class, path/to/file.py:Class, or {BUILT_IN}", field=field)
        return
    if where == BUILT_IN:
        return
    at = f"{field}.class_name"
    wrong = list(own_code_problems(where, (), field=at, settings=at, holds="your interaction class"))
    yield from wrong
    if not wrong:
        try:
            own = find(where, holds="your interaction class")
        except RequestError:
            return
        yield from method_problems(own, ("generate_response",), field=at)
