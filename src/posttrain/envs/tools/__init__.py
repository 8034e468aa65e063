"""Questions answered with tools: the model calls them as often as it wants, then answers.

Each file here holds one tool, of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from posttrain.config.checks.settings import setting_problems
from posttrain.data.tool_calls import ToolCall, argument_problem
from posttrain.data.tool_forms import calls_of
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep, Message
from posttrain.interfaces.tool import Tool, ToolFailed
from posttrain.libraries.own_code import load
from posttrain.registry import ENVS, TOOLS
from posttrain.settings import NonNegativeInt, PositiveInt


@ENVS.register("tools")
def tools(
    spec: EnvSpec,
    *,
    tools: Sequence[str | Mapping[str, Any]],
    max_calls_per_turn: NonNegativeInt | None = None,
    max_calls: NonNegativeInt | None = None,
    max_result_characters: PositiveInt = 2000,
    cut: Literal["end", "start", "middle"] = "end",
    role: Literal["tool", "user"] = "tool",
    call_reward: float = 0.0,
    failed_call_reward: float = 0.0,
) -> Env:
    """The row's conversation, with tools that the model may call; an answer without a call ends the episode, and the run's
    reward terms score it.

    Args: tools, names of tools, or mappings of a name and its options ({name: search, corpus: wiki.jsonl}); the option schema,
        which every tool has, replaces its schema in the prompt; a name with a colon is a user's function that returns a
        Tool. A row whose need_tools_kwargs is true is offered only the tools that its tools_kwargs name. Only the first
        max_calls_per_turn calls of a turn are run (null: all), and the first max_calls of the episode; a result of more than
        max_result_characters is cut; role of the messages that hold results, user for chat templates without tools;
        call_reward is given for every call that succeeds, failed_call_reward for every other.
    Raises: ConfigError with the problems of all tools.
    """
    if cut not in ("end", "start", "middle"):
        raise ConfigError(Problem(f"cut is {cut!r}", fix="use end, start or middle"))
    if role not in ("tool", "user"):
        raise ConfigError(Problem(f"role is {role!r}", fix="use tool or user"))
    return WithTools(
        spec,
        tools_of(tools),
        max_calls_per_turn=max_calls_per_turn,
        max_calls=max_calls,
        max_result_characters=max_result_characters,
        cut=cut,
        role=role,
        rewards=(call_reward, failed_call_reward),
    )


class WithTools:
    def __init__(
        self,
        spec: EnvSpec,
        tools: Sequence[Tool],
        *,
        max_calls_per_turn: int | None,
        max_calls: int | None,
        max_result_characters: int,
        cut: str,
        role: str,
        rewards: tuple[float, float],
    ):
        self._messages = spec.messages
        self._row = spec.row
        self._max_turns = spec.max_turns
        self._form = spec.tool_call_form
        self._all = tools
        self._tools = {tool.name: tool for tool in tools}  # offered to the model
        self._max_calls_per_turn = max_calls_per_turn
        self._max_calls = max_calls
        self._longest = max_result_characters
        self._cut = cut
        self._role = role
        self._rewards = rewards
        self._turns = self._answered = self._failed = 0

    def reset(self, seed: int) -> EnvStart:
        for tool in self._tools.values():
            tool.begin(self._row)
        named = {name for name, value in (self._row.get("tools_kwargs") or {}).items() if value is not None}
        if self._row.get("need_tools_kwargs") and named:
            self._tools = {name: tool for name, tool in self._tools.items() if name in named}
        return EnvStart(messages=self._messages, tools=[tool.schema for tool in self._tools.values()])

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        calls = self.calls_in(action)
        if not calls:
            return EnvStep(done=True, stop="answered")
        if self._turns == self._max_turns:  # the results would not be read
            return EnvStep(done=True, stop="max_turns")
        before = self._answered, self._failed
        results = [self._result(number, call) for number, call in enumerate(calls)]
        answered, failed = self._answered - before[0], self._failed - before[1]
        reward = answered * self._rewards[0] + failed * self._rewards[1]
        return EnvStep(messages=results, reward=reward if any(self._rewards) else None)

    def state(self) -> Any:
        """Return the counts and the states of the tools; None where a tool cannot be saved."""
        if not all(tool.state and tool.restore for tool in self._all):
            return None
        return {"counts": list(self.counts), "tools": {tool.name: tool.state() for tool in self._all if tool.state}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.reset(0)
        self.counts = tuple(state["counts"])
        for tool in self._all:
            if tool.restore:
                tool.restore(state["tools"][tool.name])

    @property
    def counts(self) -> tuple[int, ...]:
        """The turns, and the calls that were answered and that failed: all that the limits depend on."""
        return self._turns, self._answered, self._failed

    @counts.setter
    def counts(self, values: tuple[int, ...]) -> None:
        self._turns, self._answered, self._failed = values

    def calls_in(self, action: str) -> list[ToolCall]:
        """Parse the calls of a turn, in the form of the model."""
        return calls_of(self._form, action, {tool.name: tool.parameters for tool in self._tools.values()})

    def close(self) -> Mapping[str, float]:
        """Return the numbers of successful and failed calls and of turns, and the tools' own metrics."""
        told: dict[str, float] = {}
        for tool in self._all:
            told |= tool.close() or {}
        return {
            **told,
            "tool_calls": float(self._answered + self._failed),
            "failed_tool_calls": float(self._failed),
            "num_actions": float(self._turns),
        }

    def _result(self, number: int, call: ToolCall) -> Message:
        """Run a call. Returns: the message that answers it, also when the call failed."""
        try:
            text = self._run(number, call)
            self._answered += 1
        except ToolFailed as error:
            text = f"Error: {error}"
            self._failed += 1
        named = {"name": call.name} if call.name and self._role == "tool" else {}
        if call.call_id and self._role == "tool":
            named["tool_call_id"] = call.call_id
        return {"role": self._role, **named, "content": shortened(text, self._longest, self._cut)}

    def _run(self, number: int, call: ToolCall) -> str:
        if call.problem:
            raise ToolFailed(call.problem)
        if self._max_calls_per_turn is not None and number >= self._max_calls_per_turn:
            raise ToolFailed(f"only {self._max_calls_per_turn} calls of a turn are run")
        if self._max_calls is not None and self._answered + self._failed >= self._max_calls:
            raise ToolFailed(f"all {self._max_calls} calls are used up; answer now")
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolFailed(f"there is no tool {call.name!r} (known: {', '.join(self._tools)})")
        if problem := argument_problem(call.arguments, tool.parameters):
            raise ToolFailed(problem)
        return tool.run(call.arguments)


def shortened(text: str, longest: int, cut: str) -> str:
    """Cut a text to at most ``longest`` characters, with a mark in place of the rest. ``cut``: the removed part, end, start or
    middle."""
    if len(text) <= longest:
        return text
    if cut == "end":
        return f"{text[:longest]}...(truncated)"
    if cut == "start":
        return f"(truncated)...{text[len(text) - longest :]}"
    half = longest // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def tools_of(wanted: Sequence[str | Mapping[str, Any]]) -> list[Tool]:
    """Build the tools. Raises: ConfigError with the problems of all of them."""
    made: list[Tool] = []
    problems: list[Problem] = []
    for one in wanted:
        options = {"name": one} if isinstance(one, str) else dict(one)
        try:
            made += _made(str(options.pop("name", "")), options)
        except RequestError as error:
            problems += error.problems
    names = [tool.name for tool in made]
    problems += [Problem(f"two tools are called {name}") for name in sorted({n for n in names if names.count(n) > 1})]
    if not made and not problems:
        problems.append(Problem("tools is empty", fix=f"name some (known: {', '.join(TOOLS.names())})"))
    if problems:
        for tool in made:
            tool.close()
        raise ConfigError(problems)
    return made


def _made(name: str, options: dict[str, Any]) -> Sequence[Tool]:
    """Build one tool, or all tools of a server."""
    schema = options.pop("schema", None)
    own = ":" in name
    build = load(name) if own else TOOLS.get(name)
    found = build(**(options if own else _checked(name, options)))
    tools = [found] if isinstance(found, Tool) else list(found)
    if schema is None:
        return tools
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if len(tools) != 1 or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        for tool in tools:
            tool.close()
        what = f"the schema of the tool {name} cannot be used"
        raise ConfigError(Problem(what, fix="write {type: function, function: {name, description, parameters}}"))
    return [
        replace(
            tools[0],
            name=function["name"],
            description=str(function.get("description", tools[0].description)),
            parameters=function.get("parameters", tools[0].parameters),
        )
    ]


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, converted to the types of the tool's settings. Raises: ConfigError."""
    known = TOOLS.settings(name)
    if problems := list(setting_problems(f"the tool {name}", known, options, f"tools.{name}", word="option")):
        raise ConfigError(problems)
    return {option: known[option].checked(value) for option, value in options.items()}
