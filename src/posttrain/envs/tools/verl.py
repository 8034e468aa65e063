"""Tool classes written for verl: ``create``, ``execute``, ``calc_reward`` and ``release``, of one instance per episode.

verl itself is not needed: where it is not installed, the bases and records that such a class imports are stand-ins. Methods
may be coroutine functions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import Tool, ToolFailed
from posttrain.libraries.own_code import Calls, load
from posttrain.libraries.verl import modules as verl_modules
from posttrain.libraries.verl.tools import BaseTool
from posttrain.registry import TOOLS


@TOOLS.register("verl", own_code=("class_name",))
def verl(
    *, class_name: str, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
) -> Tool:
    """A tool defined as in a verl tool file.

    The class is constructed with ``config`` and ``tool_schema``: verl's own model of a schema where its module imports verl's
    tools, else a mapping. The row's ``tools_kwargs[name]`` holds create_kwargs, execute_kwargs, calc_reward_kwargs and
    release_kwargs.

    Args: class_name, package.module.Class or path/to/file.py:Class; tool_schema may be omitted where the class has
        ``get_openai_tool_schema``. A class with ``state(instance_id)``, which returns a JSON value, and
        ``restore(instance_id, state)`` can be saved between turns.
    Raises: ConfigError when the class or its schema does not exist.
    """
    verl_modules.provide()
    made = load(class_name)
    given = tool_schema
    if tool_schema and _imports_verl(made):
        given = import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(tool_schema)
    instance = made(config=dict(config or {}), tool_schema=given)
    schema = tool_schema
    if schema is None and hasattr(instance, "get_openai_tool_schema"):
        found = instance.get_openai_tool_schema()
        schema = found.model_dump(exclude_none=True) if hasattr(found, "model_dump") else found
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        fix = "give it a tool_schema: {type: function, function: {name, description, parameters}}"
        raise ConfigError(Problem(f"the tool class {class_name} has no schema", fix=fix))
    own = _OwnTool(instance, function["name"])
    saved = all(callable(getattr(instance, name, None)) for name in ("state", "restore"))
    return Tool(
        name=function["name"],
        description=str(function.get("description", "")),
        parameters=function.get("parameters", {"type": "object", "properties": {}}),
        run=own.run,
        begin=own.begin,
        close=own.close,
        state=own.state if saved else None,
        restore=own.restore if saved else None,
    )


def _imports_verl(made: Any) -> bool:
    """Return True for a class in whose module a name of verl's tools is, the stand-ins' included."""
    named = vars(sys.modules[made.__module__]).values()
    ours = str(BaseTool.__module__)
    return any(str(getattr(value, "__module__", "")).startswith(("verl.tools.", ours)) for value in named)


class _OwnTool:
    """An episode's instance of the tool, created at the first call."""

    def __init__(self, tool: Any, name: str):
        self._tool = tool
        self._name = name
        self._calls = Calls()
        self._arguments: Mapping[str, Any] = {}
        self._instance: Any = None
        self._step_rewards = 0.0

    def begin(self, row: Mapping[str, Any]) -> None:
        self._arguments = (row.get("tools_kwargs") or {}).get(self._name) or {}

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool. Raises: ToolFailed for any error of the class: the model reads it."""
        try:
            if self._instance is None:
                self._create()
            answer = self._calls.call(
                self._tool.execute, self._instance, dict(arguments), **self._given("execute_kwargs")
            )
        except Exception as error:  # a user's class may raise anything
            raise ToolFailed(f"{type(error).__name__}: {error}") from error
        if isinstance(answer, tuple):
            reward = answer[1] if len(answer) > 1 else None
            self._step_rewards += float(reward or 0.0)
            answer = answer[0]
        return text_of(answer)

    def _create(self) -> None:
        created = self._calls.call(self._tool.create, "episode", **self._given("create_kwargs"))
        self._instance = created[0] if isinstance(created, tuple) else created

    def state(self) -> Any:
        """Return the state of the instance, where there is one, and the rewards of its steps."""
        kept = None if self._instance is None else [self._calls.call(self._tool.state, self._instance)]
        return {"instance": kept, "rewards": self._step_rewards}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step_rewards = state["rewards"]
        if state["instance"] is not None:
            self._create()
            self._calls.call(self._tool.restore, self._instance, state["instance"][0])

    def close(self) -> Mapping[str, float]:
        """Return its rewards as metrics; in verl, too, only the scorers decide the reward."""
        try:
            if self._instance is None:
                return {}
            final = None
            if hasattr(self._tool, "calc_reward"):
                final = self._calls.call(self._tool.calc_reward, self._instance, **self._given("calc_reward_kwargs"))
            if hasattr(self._tool, "release"):
                self._calls.call(self._tool.release, self._instance, **self._given("release_kwargs"))
            rewards = {f"tool_step_reward/{self._name}": self._step_rewards}
            return rewards if final is None else {**rewards, f"tool_reward/{self._name}": float(final)}
        finally:
            self._calls.close()

    def _given(self, kind: str) -> dict[str, Any]:
        return dict(self._arguments.get(kind) or {})


def text_of(answer: Any) -> str:
    """Return a text, or the text of a ToolResponse. Raises: ToolFailed for one that holds images."""
    if isinstance(answer, str):
        return answer
    if getattr(answer, "image", None) or getattr(answer, "video", None):
        raise ToolFailed("the tool answered with an image, which cannot be shown here")
    text = getattr(answer, "text", answer)
    return "" if text is None else str(text)
