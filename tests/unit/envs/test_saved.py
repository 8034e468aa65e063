"""Environments that are saved between turns, and continued by a new one in their place: the rest is as it would have been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.make import HostedEpisode
from posttrain.interfaces.env import EnvSpec

CLASSES = '''
class Quiz:
    """Counts its questions, and ends with the third answer."""

    def __init__(self, config): self.config = config
    async def start_interaction(self, instance, **more): self.asked = {instance: self.config["first"]}
    async def generate_response(self, instance, messages, **more):
        self.asked[instance] += 1
        return self.asked[instance] >= 3, f"{self.asked[instance]} of {len(messages)}", self.asked[instance] / 3, {}
    def state(self, instance): return self.asked[instance]
    def restore(self, instance, state): self.asked[instance] = state

class Forgetful(Quiz):
    state = None

class Purse:
    """A tool in verl's form."""

    def __init__(self, config, tool_schema): self.coins = {}
    async def create(self, instance_id=None, coins=0, **more): self.coins[instance_id] = coins; return instance_id
    async def execute(self, instance_id, parameters, **more):
        self.coins[instance_id] -= int(parameters["coins"])
        return f"{self.coins[instance_id]} left", 0.25, {}
    async def calc_reward(self, instance_id, **more): return float(self.coins[instance_id])
    async def state(self, instance_id): return self.coins[instance_id]
    async def restore(self, instance_id, state): self.coins[instance_id] = state
'''
SCHEMA = {
    "type": "function",
    "function": {"name": "purse", "parameters": {"type": "object", "properties": {"coins": {"type": "integer"}}}},
}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(CLASSES)
    return str(tmp_path / "own.py")


def spec(name: str, own: str, **settings: Any) -> EnvSpec:
    purse = {"name": "verl", "class_name": f"{own}:Purse", "tool_schema": SCHEMA}
    if name == "tools":
        settings = {"tools": ["calculator", "gsm8k", purse], "max_calls": 4, "call_reward": 0.5}
    row = {
        "ground_truth": "72",
        "tools_kwargs": {"purse": {"create_kwargs": {"coins": 9}}},
        "interaction_kwargs": {"name": "quiz", "place": 1},
    }
    asked = [{"role": "user", "content": "How many?"}]
    return EnvSpec(name=name, settings=settings, messages=asked, row=row, max_turns=6, saves=True)


def interaction(own: str, kind: str) -> EnvSpec:
    quiz = {"name": "quiz", "class_name": f"{own}:{kind}", "config": {"first": 0}}
    return spec("interaction", own, interactions=[quiz], tools=["calculator"])


def questions(own: str) -> EnvSpec:
    file = Path(own).with_name("questions.jsonl")
    file.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(9)))
    return spec("questions", own, file=str(file), tools=["calculator"])


def played(made: EnvSpec, actions: Sequence[str], *, saved_after: int | None = None) -> list[Any]:
    """Play an episode, which another environment continues after so many turns. Returns: its answers, and its metrics."""
    episode = HostedEpisode(made, seed=1_000_003)
    told = [episode.reset()]
    for turn, action in enumerate(actions):
        if turn == saved_after:
            saved = json.loads(json.dumps(told[-1]["saved"]))
            episode.close()
            episode = HostedEpisode(made, seed=1_000_003)
            assert episode.restore(saved) == {"restored": True}
        told.append(episode.step(action))
    return [*told, episode.close()]


ACTIONS = {
    "tools": [called("calculator", expression="6 * 12"), called("purse", coins=2) + called("gsm8k", answer="71"),
              called("calc_gsm8k_reward", answer="72") + called("purse", coins=3), called("calculator", expression="1"), "72"],
    "interaction": ["one", called("calculator", expression="2 + 2"), "two", "three"],
    "questions": [called("calculator", expression="4 + 1"), called("calculator", expression="1"), "5"],
}  # fmt: skip


@pytest.mark.parametrize("name", list(ACTIONS))
def test_a_saved_episode_goes_on_as_it_would_have(name: str, own: str) -> None:
    made = {"interaction": lambda: interaction(own, "Quiz"), "questions": lambda: questions(own)}.get(
        name, lambda: spec(name, own)
    )()
    whole = played(made, ACTIONS[name])
    assert all(each["saved"] is not None for each in whole[:-1])
    for turn in range(1, len(ACTIONS[name])):
        assert played(made, ACTIONS[name], saved_after=turn) == whole, turn


def test_what_cannot_be_saved_is_not(own: str) -> None:
    assert HostedEpisode(interaction(own, "Forgetful"), 0).reset()["saved"] is None
    (Path(own).parent / "tool.py").write_text(
        "from posttrain.interfaces.tool import Tool, parameters\n"
        "def tool(): return Tool(name='t', description='', parameters=parameters(), run=lambda given: '')\n"
    )
    made = EnvSpec(
        name="tools", settings={"tools": ["calculator", {"name": f"{Path(own).parent}/tool.py:tool"}]}, saves=True
    )
    assert HostedEpisode(made, 0).reset()["saved"] is None
