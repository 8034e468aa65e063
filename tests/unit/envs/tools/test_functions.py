"""Tools that are plain functions, and classes that import verl's bases, without verl."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.libraries.verl.tools import ToolResponse, answer_of

FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def weather(city: str, days: int = 1) -> dict:
    """Say the weather.

    Args:
        city: Where.
        days: How many days ahead.
    """
    if city == "Atlantis":
        raise KeyError(city)
    return {"sky": "grün", "days": days}

@function_tool("twice")
async def double(number: int):
    """Double a number.

    Args:
        number: Any.
    """
    return ToolResponse(text=str(2 * number)), 0.25, {}

@function_tool(schema={"type": "function", "function": {"name": "raw", "description": "r"}})
def raw(**anything):
    return "raw"
'''
CLASS = """
from uuid import uuid4
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Shout(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.seen = {}
    async def create(self, instance_id=None, **kwargs):
        self.seen[instance_id or str(uuid4())] = 0
        return instance_id, ToolResponse()
    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.seen[instance_id] += 1
        return ToolResponse(text=f"{self.name} {parameters['text'].upper()} {self.seen[instance_id]}"), 0.5, {}

class Quiz(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, f"{self.name}: again", 0.0, {}
"""
# verl's modules are stood in for in sys.modules: a process of its own, as workers are.
PLAY = """
import json, sys
from posttrain.envs.interaction import interaction
from posttrain.envs.tools import tools
from posttrain.interfaces.env import EnvSpec
settings, row, actions = json.loads(sys.argv[1])
build = interaction if "interactions" in settings else tools
env = build(EnvSpec(name="tools", messages=[{"role": "user", "content": "?"}], row=row), **settings)
start = env.reset(0)
said = [[message["content"] for message in env.step(action).messages] for action in actions]
print(json.dumps([start.tools, said, env.close()]))
"""


def play(settings: dict[str, Any], actions: list[str], row: dict[str, Any] | None = None) -> Any:
    arguments = [sys.executable, "-c", PLAY, json.dumps([settings, row or {}, actions])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.slow
def test_functions_of_a_file_are_tools(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    actions = [call("weather", city="Rome") + call("twice", number=4), call("weather", city="Atlantis") + call("raw")]
    offered, said, told = play({"tools": ["calculator", {"name": "functions", "file": str(file)}]}, actions)
    assert [one["function"]["name"] for one in offered] == ["calculator", "weather", "twice", "raw"]
    parameters = offered[1]["function"]["parameters"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "Where."}
    assert parameters["required"] == ["city"]
    assert said == [['{"sky": "grün", "days": 1}', "8"], ["Error: KeyError: 'Atlantis'", "raw"]]
    assert told["tool_step_reward/twice"] == 0.25 and told["failed_tool_calls"] == 1


@pytest.mark.slow
def test_classes_have_verls_bases(tmp_path: Path) -> None:
    file = tmp_path / "classes.py"
    file.write_text(CLASS)
    schema = {"type": "function", "function": {"name": "shout", "description": "", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}}}}}  # fmt: skip
    entry = {"name": "verl", "class_name": f"{file}:Shout", "tool_schema": schema}
    quiz = {"name": "quiz", "class_name": f"{file}:Quiz", "config": {"name": "quiz"}}
    settings = {"tools": [entry], "interactions": [quiz]}
    actions = [call("shout", text="a"), call("shout", text="b"), "42"]
    _, said, told = play(settings, actions, {"interaction_kwargs": {"name": "quiz"}})
    assert said == [["shout A 1"], ["shout B 2"], ["quiz: again"]]
    assert told["tool_step_reward/shout"] == 1.0  # two answers with 0.5 each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "holds no function that is a tool"),
        ("import nowhere_at_all", "cannot be imported: ModuleNotFoundError"),
        (FUNCTIONS.replace("city: Where.", ""), "cannot be imported: DocstringParsingException"),
    ],
)
def test_a_file_without_tools_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "functions.py"
    file.write_text(text)
    arguments = [
        sys.executable,
        "-c",
        PLAY,
        json.dumps([{"tools": [{"name": "functions", "file": str(file)}]}, {}, []]),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr and says in done.stderr


def test_what_a_function_may_return() -> None:
    assert answer_of(3) == (ToolResponse(text="3"), 0.0)
    assert answer_of(({"a": 1}, None)) == (ToolResponse(text='{"a": 1}'), 0.0)
    assert answer_of((ToolResponse(text="x"), 0.5, {})) == (ToolResponse(text="x"), 0.5)
    with pytest.raises(TypeError, match="not 4 values"):
        answer_of((1, 2, 3, 4))
