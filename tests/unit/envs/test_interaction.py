"""The other side of a conversation, in verl's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.envs.interaction import interaction
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

ASKED = [{"role": "user", "content": "6 x 12?"}]
GSM8K = {"name": "gsm8k", "class_name": "gsm8k"}
QUIZ = '''
class Quiz:
    """Counts what was said, and ends after config["rounds"]."""
    def __init__(self, config):
        self.rounds = config["rounds"]
    async def start_interaction(self, instance_id, topic=None, **kwargs):
        self.topic = topic
    async def generate_response(self, instance_id, messages, **kwargs):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return len(said) == self.rounds, f"{self.topic}: {said[-1]}?", len(said) / 10, {}
    async def finalize_interaction(self, instance_id, **kwargs):
        pass
'''


def talk(*interactions: dict[str, Any], tools: Any = (), **row: Any) -> Any:
    return interaction(EnvSpec(name="interaction", messages=ASKED, row=row), interactions=interactions, tools=tools)


def test_a_wrong_answer_is_sent_back_and_a_right_one_ends_the_talk() -> None:
    env = talk(GSM8K, interaction_kwargs={"name": "gsm8k", "ground_truth": "72", "query": "6 x 12?"})
    assert env.reset(0).messages == ASKED
    step = env.step("#### 71")
    assert not step.done and step.reward is None
    assert step.messages == [
        {"role": "user", "content": "Your response is incorrect! You need to reflect on your answer and try again."}
    ]
    step = env.step("Then it is #### 72")
    assert (step.done, step.stop) == (True, "ended")
    assert env.close() == {"tool_calls": 0, "failed_tool_calls": 0, "num_actions": 2, "interaction_score": 1}


def test_tools_come_first(tmp_path: Path) -> None:
    (tmp_path / "quiz.py").write_text(QUIZ)
    own = {"name": "quiz", "class_name": f"{tmp_path}/quiz.py:Quiz", "config": {"rounds": 2}}
    env = talk(GSM8K, own, tools=["calculator"], interaction_kwargs={"name": "quiz", "topic": "sums"})
    assert [tool["function"]["name"] for tool in env.reset(0).tools] == ["calculator"]
    call = json.dumps({"name": "calculator", "arguments": {"expression": "6*12"}})
    assert env.step(f"<tool_call>{call}</tool_call>").messages == [
        {"role": "tool", "name": "calculator", "content": "72"}
    ]
    assert env.step("72").done  # its class has heard two replies by now
    assert env.close()["interaction_score"] == 0.2


def test_a_row_without_one_is_over_with_an_answer() -> None:
    env = talk(GSM8K)
    env.reset(0)
    assert env.step("72").stop == "answered"
    assert "interaction_score" not in env.close()


def test_a_row_that_names_another_one() -> None:
    with pytest.raises(ConfigError, match="the row names the interaction 'quiz' \\(known: gsm8k\\)"):
        talk(GSM8K, interaction_kwargs={"name": "quiz"})
