"""Tools that are plain functions, written for verl's ``function_tool`` decorator."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from posttrain.envs.tools.verl import text_of
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import Tool, ToolFailed
from posttrain.libraries.own_code import Calls, load_file
from posttrain.libraries.verl import modules as verl_modules
from posttrain.libraries.verl.tools import FunctionTool, answer_of
from posttrain.registry import TOOLS


@TOOLS.register("functions", built_once=True, files=("file",))
def functions(*, file: str) -> list[Tool]:
    """All functions of a Python file that ``verl.tools.function_tool.function_tool`` decorates; they may be coroutine functions.

    A function returns a text, a mapping (shown as JSON), or either with a reward and metrics; rewards are reported only.

    Raises: ConfigError when the file cannot be imported, or holds no such function.
    """
    verl_modules.provide()
    try:
        module = load_file(file)
    except ConfigError:
        raise
    except Exception as error:  # a user's file may raise anything
        what = f"{file} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, fix="give every parameter a type and a line below Args:")) from error
    found = _registered(module.__name__)
    if not found:
        fix = "write @function_tool (from verl.tools.function_tool import function_tool) above a function"
        raise ConfigError(Problem(f"{file} holds no function that is a tool", fix=fix))
    return [_tool(one) for one in found]


def _registered(module: str) -> list[FunctionTool]:
    """The functions that a module has registered, in its order."""
    registry = import_module(
        "verl.tools.function_tool"
    ).FUNCTION_TOOL_REGISTRY  # the stand-in's, or an installed verl's
    return [one for one in registry.values() if one.fn.__module__ == module]


def _tool(one: FunctionTool) -> Tool:
    called = _Called(one)
    function = one.tool_schema.model_dump(exclude_none=True)["function"]
    return Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters", {"type": "object", "properties": {}}),
        run=called.run,
        close=called.close,
        state=called.state,
        restore=called.restore,
    )


class _Called:
    """A function's calls in one episode."""

    def __init__(self, one: FunctionTool):
        self._one = one
        self._calls = Calls()
        self._rewards = 0.0

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function. Raises: ToolFailed for any error of it: the model reads it."""
        try:
            answer, reward = answer_of(self._calls.call(self._one.fn, **arguments))
        except Exception as error:  # a user's function may raise anything
            raise ToolFailed(f"{type(error).__name__}: {error}") from error
        self._rewards += reward
        return text_of(answer)

    def state(self) -> float:
        """Return the rewards so far: functions keep nothing else of an episode."""
        return self._rewards

    def restore(self, state: float) -> None:
        self._rewards = state

    def close(self) -> Mapping[str, float]:
        self._calls.close()
        return {f"tool_step_reward/{self._one.name}": self._rewards} if self._rewards else {}
