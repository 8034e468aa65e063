"""Tools of the user's: functions that return a Tool, and classes in verl's form; and how a row chooses among tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.envs.tools import tools
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

ASKED = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": {"properties": {"city": {"type": "string"}}}},
}  # fmt: skip

OWN = '''
import posttrain.interfaces.tool as t

def echo(mark="!"):
    return t.Tool(name="echo", description="", parameters=t.parameters(text=("string", "")), run=lambda a: a["text"] + mark)

class Reply:
    def __init__(self, text, image=None):
        self.text, self.image = text, image

class Weather:
    """In verl's form: coroutine functions, an instance per episode."""
    def __init__(self, config, tool_schema):
        self.config, self.seen = config, {}
    async def create(self, instance_id=None, season="?", **kwargs):
        self.seen[instance_id] = season
        return instance_id, Reply("made")
    async def execute(self, instance_id, parameters, shout=False, **kwargs):
        if parameters["city"] == "Atlantis":
            raise KeyError("Atlantis")
        if parameters["city"] == "Paris":
            return Reply("see", image=["picture"]), 0.0, {}
        text = f"{self.config['sky']} in {parameters['city']} in {self.seen[instance_id]}"
        return Reply(text.upper() if shout else text), 0.25, {}
    async def calc_reward(self, instance_id, **kwargs):
        return 0.5
    async def release(self, instance_id, **kwargs):
        del self.seen[instance_id]
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def weather(own: Path, **row: Any) -> Any:
    entry = {"name": "verl", "class_name": f"{own}:Weather", "config": {"sky": "sun"}, "tool_schema": SCHEMA}
    return tools(EnvSpec(name="tools", messages=ASKED, row=row), tools=[entry, "calculator"])


def test_a_class_in_verls_form(own: Path) -> None:
    kwargs = {"weather": {"create_kwargs": {"season": "May"}, "execute_kwargs": {"shout": True}}, "calculator": None}
    env = weather(own, tools_kwargs=kwargs)
    start = env.reset(0)
    assert [tool["function"]["name"] for tool in start.tools] == ["weather", "calculator"]
    assert start.tools[0] == {**SCHEMA, "function": {**SCHEMA["function"]}}  # type: ignore[dict-item]
    step = env.step(call("weather", city="Rome") + call("weather", city="Oslo"))
    assert [message["content"] for message in step.messages] == ["SUN IN ROME IN MAY", "SUN IN OSLO IN MAY"]
    assert step.reward is None  # the class's rewards are told, and do not count
    step = env.step(call("weather", city="Atlantis") + call("weather", city="Paris"))
    assert [message["content"] for message in step.messages] == [
        "Error: KeyError: 'Atlantis'",
        "Error: the tool answered with an image, which cannot be shown here",
    ]
    # three answers with a reward of 0.25, the picture's with 0
    told = env.close()
    assert told["tool_step_reward/weather"] == 0.5 and told["tool_reward/weather"] == 0.5
    assert (told["tool_calls"], told["failed_tool_calls"]) == (4, 2)


def test_a_row_may_name_its_tools(own: Path) -> None:
    env = weather(own, need_tools_kwargs=True, tools_kwargs={"calculator": {}, "weather": None})
    assert [tool["function"]["name"] for tool in env.reset(0).tools] == ["calculator"]
    assert "there is no tool 'weather'" in env.step(call("weather", city="Rome")).messages[0]["content"]
    env = weather(own, need_tools_kwargs=True, tools_kwargs={})  # as in verl, nothing named is nothing said
    assert len(env.reset(0).tools) == 2


def test_a_tool_that_was_never_called_tells_nothing(own: Path) -> None:
    env = weather(own)
    env.reset(0)
    assert env.step("It is sunny.").done
    assert set(env.close()) == {"tool_calls", "failed_tool_calls", "num_actions"}


def test_a_function_that_returns_a_tool(own: Path) -> None:
    env = tools(EnvSpec(name="tools", messages=ASKED), tools=[{"name": f"{own}:echo", "mark": "?"}])
    env.reset(0)
    assert env.step(call("echo", text="hm")).messages[0]["content"] == "hm?"


def test_gsm8k_says_whether_an_answer_is_right() -> None:
    schema = {"type": "function", "function": {"name": "check", "description": "d"}}
    spec = EnvSpec(name="tools", messages=ASKED, row={"ground_truth": "72"})
    env = tools(spec, tools=[{"name": "gsm8k", "schema": schema}])
    assert env.reset(0).tools[0]["function"]["name"] == "check"
    step = env.step(call("check", answer="71") + call("check", answer="it is 72"))
    assert [message["content"] for message in step.messages] == [
        "Current parsed answer='71' reward=0.0",
        "Current parsed answer='it is 72' reward=1.0",
    ]
    assert env.close()["tool_reward/gsm8k"] == 1.0


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "verl", "class_name": "no.such.Class"}, "there is no module no.such"),
        ({"name": "verl", "class_name": "Class"}, "names no class"),
        ({"name": "verl", "class_name": "json.Nothing"}, "json has no class Nothing"),
        ({"name": "verl"}, "the tool verl needs the option 'class_name'"),
        ({"name": "calculator", "schema": {"name": "x"}}, "the schema of the tool calculator cannot be used"),
        ({"name": "nowhere.py:echo"}, "there is no file nowhere.py"),
    ],
)
def test_what_cannot_be_made(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tools(EnvSpec(name="tools", messages=ASKED), tools=[entry])


def test_a_class_without_a_schema(own: Path) -> None:
    with pytest.raises(ConfigError, match="has no schema; give it a tool_schema"):
        tools(EnvSpec(name="tools"), tools=[{"name": "verl", "class_name": f"{own}:Weather", "config": {"sky": "sun"}}])
