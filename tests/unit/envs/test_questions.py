"""Questions of a dataset and tasks of reasoning-gym as environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.envs.questions import questions
from posttrain.envs.reasoning_gym import reasoning_gym
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec
from posttrain.plan.environments.questions import questions as check

SPEC = EnvSpec(name="questions", max_turns=4)
ROWS = [
    {"question": "1/2 + 1/4?", "answer": "3/4"},
    {"question": "The capital of France?", "answer": ["Paris", "paris, France"]},
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def test_the_last_box_is_graded_as_an_expression(file: str) -> None:
    for said, reward in (
        (r"\boxed{1}, no: \boxed{\frac{3}{4}}", 1.0),
        (r"\boxed{0.75}", 1.0),
        (r"\boxed{1}", 0.0),
        ("3/4", -0.5),
    ):
        env = questions(SPEC, file=file, format_penalty=-0.5, template="{observation} In a box.")
        assert env.reset(0).messages == [{"role": "user", "content": "1/2 + 1/4? In a box."}]
        step = env.step(said)
        assert (step.reward, step.done) == (reward, True), said
        assert env.close()["action_is_valid"] == float("boxed" in said)


def test_any_reference_is_right_and_words_ignore_case_and_articles(file: str) -> None:
    env = questions(SPEC, file=file, grader="text", action_pattern=r".*<answer>(.*?)</answer>")
    env.reset(1)
    assert env.step("<answer>the PARIS</answer>").reward == 1.0
    env.reset(3)  # validation takes rows in order: 3 is row 1 again
    assert env.step("<answer>London</answer>").reward == 0.0


def test_training_draws_rows_by_the_seed(file: str) -> None:
    drawn = [questions(SPEC, file=file).reset(1_000_000 + seed).messages[0]["content"] for seed in range(20)]
    assert {*drawn} == {row["question"] for row in ROWS}
    assert drawn == [questions(SPEC, file=file).reset(1_000_000 + seed).messages[0]["content"] for seed in range(20)]


def test_tools_are_called_before_the_answer(file: str) -> None:
    env = questions(SPEC, file=file, tools=["calculator"], call_reward=0.25, failed_call_reward=-0.25, max_calls=1)
    assert [tool["function"]["name"] for tool in env.reset(0).tools] == ["calculator"]
    asked = f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': '1/2+1/4'}})}</tool_call>"
    first, second = env.step(asked), env.step(asked)
    assert (first.reward, first.done, second.reward) == (0.25, False, -0.25)
    last = env.step(r"\boxed{3/4}")
    assert (last.reward, last.done, last.stop) == (1.0, True, "solved")
    assert env.close()["tool_calls"] == 2
    unanswered = questions(SPEC, file=file, tools=["calculator"], max_turns=1)
    unanswered.reset(0)
    assert unanswered.step(asked).stop == "max_turns"


def test_what_cannot_be_asked_is_a_problem_of_the_plan(file: str) -> None:
    [missing] = check({"file": "no/such.jsonl"}, "at")
    assert missing.what == "there is no file no/such.jsonl" and missing.field == "at.file"
    [column] = check({"file": file, "answer_column": "solution"}, "at")
    assert column.what.startswith("row 0 of asked.jsonl has no 'solution'") and column.field == "at.answer_column"
    [tool] = check({"file": file, "tools": ["calculater"]}, "at")
    assert "calculator" in str(tool)
    assert not list(check({"file": file, "tools": ["calculator"]}, "at"))


def test_a_task_of_reasoning_gym_is_scored_by_its_verifier() -> None:
    env = reasoning_gym(EnvSpec(name="reasoning_gym"), task="letter_counting")
    question = env.reset(3).messages[0]["content"]
    letter, text = question.split('"')[1], question.split('"')[3]
    assert env.step(rf"\boxed{{{text.lower().count(letter.lower())}}}").reward == 1.0
    assert (
        reasoning_gym(EnvSpec(name="reasoning_gym"), task="letter_counting").reset(3).messages[0]["content"] == question
    )
    env = reasoning_gym(EnvSpec(name="reasoning_gym"), task="letter_counting")
    env.reset(3)
    assert (env.step("I do not know").reward, env.close()["success"]) == (0.0, 0.0)
    with pytest.raises(ConfigError, match="letter_counting"):
        reasoning_gym(EnvSpec(name="reasoning_gym"), task="letter_countin")
    with pytest.raises(ConfigError, match="eval"):
        reasoning_gym(EnvSpec(name="reasoning_gym"), task="countdown")
