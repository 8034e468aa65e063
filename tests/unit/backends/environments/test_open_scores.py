"""Conversations of programs outside whose reward an environment of the run gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from open_runs import Run, said
from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.environments.open.journal import Journal
from posttrain.backends.environments.processes import ProcessHost
from posttrain.interfaces.env import EnvSpec, ScoringHost

pytestmark = pytest.mark.usefixtures("warm_children")

WORLDS = '''
import os, time
from posttrain.interfaces.env import EnvAsk, EnvStart, EnvStep


class Judge:
    """Scores the whole conversation."""

    def __init__(self, spec, mode="counts"):
        self.spec, self.mode = spec, mode

    async def score(self, conversation):
        if self.mode == "raises":
            raise ValueError("no such verdict")
        if self.mode == "dies":
            os._exit(3)
        if self.mode == "hangs":
            time.sleep(600)
        if self.mode == "nan":
            return float("nan")
        if self.mode == "none":
            return None
        said = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
        assert said == [turn.action for turn in conversation.turns], (said, conversation.turns)
        read = [message["content"] for turn in conversation.turns for message in turn.read]
        level = self.spec.row.get("level", 0)
        return {"reward": 10.0 * len(said) + level, "metrics": {"read": len("".join(read))}}


class Counting:
    """Says "N?" and gives N for the Nth turn, three at most; a number of the seed begins."""

    def __init__(self, spec):
        self.turn = 0

    def reset(self, seed):
        tool = {"type": "function", "function": {"name": "f"}}
        return EnvStart(messages=[{"role": "user", "content": f"seed {seed}"}], tools=[tool])

    def step(self, action):
        assert action.startswith("x")
        self.turn += 1
        done = self.turn == 3
        said = [] if done else [{"role": "user", "content": f"{self.turn}?"}]
        return EnvStep(messages=said, reward=self.turn, done=done, stop="solved" if done else "", metrics={"moves": 1})

    def close(self):
        return {"closed": 1}


class Asking:
    """Asks for two turns by itself, and scores their length."""

    def __init__(self, spec, trained=True):
        self.said, self.trained = [], trained

    def begin(self, seed, emit):
        self.emit = emit
        emit(EnvAsk(turn="1", line=0, messages=[{"role": "user", "content": "begin"}], trained=self.trained))

    def answer(self, turn, action, *, cut, prompt_tokens, response_tokens):
        self.said.append(action)
        if len(self.said) == 2:
            self.emit(EnvStep(done=True, stop="asked", reward=float(len("".join(self.said)))))
        else:
            self.emit(EnvAsk(turn="2", line=0, messages=[{"role": "user", "content": "go on"}], trained=self.trained))

    def close(self):
        return {}
'''


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., EnvSpec]:
    (tmp_path / "worlds.py").write_text(WORLDS)

    def spec(name: str, **settings: Any) -> EnvSpec:
        return EnvSpec(name=f"{tmp_path}/worlds.py:{name}", settings=settings, row={"level": 2, "ground_truth": "no"})

    return spec


@pytest.fixture(params=["processes", "inline"])
def scorer(request: pytest.FixtureRequest) -> Iterator[ScoringHost]:
    made: ScoringHost = ProcessHost(4, timeout_s=20.0) if request.param == "processes" else InlineHost()
    yield made
    made.close()


def ended(run: Run, name: str) -> dict[str, Any]:
    """Return the description of a conversation as soon as its environment has scored it, or failed."""
    end = time.monotonic() + 60
    while (found := run.call(f"/conversations/{name}"))["state"] in ("open", "scoring"):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def played(run: Run, *texts: str, name: str = "") -> str:
    """Have a conversation of these texts of the user, and return its name."""
    talk: list[str] = []
    for text in texts:
        talk.append(text)
        answer = run.chat(*talk, **({"X_Conversation_Id": name} if name else {}))
        name = answer["conversation"]
        talk.append(said(answer))
    return name


def test_an_environment_scores_the_whole_conversation(world: Callable[..., EnvSpec], scorer: ScoringHost) -> None:
    run = Run(samples=2, prompts=1, spec=world("Judge"), scorer=scorer)
    run.begin()
    first, second = played(run, "Q"), played(run, "Q", "more")
    assert run.fails("/rewards", {"conversation": first, "reward": 1.0})[0] == 409
    for name in (first, second):
        told = run.call("/rewards", {"conversation": name, "metrics": {"tries": 2}})
        assert told["state"] in ("scoring", "ended") and run.call("/rewards", {"conversation": name})["ok"], (
            "sent twice"
        )
        assert (
            run.fails("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, X_Conversation_Id=name)[
                0
            ]
            == 409
        )
    assert [ended(run, name)["reward"] for name in (first, second)] == [12.0, 22.0]  # 10 a turn, and the row's level 2
    [group] = run.end()
    assert [each.env_reward for each in group.trajectories] == [12.0, 22.0]
    metrics = [dict(each.env_metrics) for each in group.trajectories]
    assert (
        [each["read"] for each in metrics] == [1.0, 5.0]
        and metrics[0]["tries"] == 2.0
        and metrics[0]["num_actions"] == 1.0
    )
    run.host.close()


def test_an_environment_that_steps_is_played_with_the_conversation(
    world: Callable[..., EnvSpec], scorer: ScoringHost
) -> None:
    run = Run(samples=2, prompts=1, spec=world("Counting"), scorer=scorer)
    run.begin()
    begun = run.call("/conversations", {})
    [task] = begun["messages"]
    assert (
        task["content"].startswith("seed ")
        and begun["tools"][0]["function"]["name"] == "f"
        and "ground_truth" not in begun["row"]
    )
    name = begun["conversation"]
    answer = run.chat(task["content"], X_Conversation_Id=name)
    run.chat(task["content"], said(answer), "Hint: 1?", X_Conversation_Id=name)  # in the program's own words around
    run.reward(name, None)
    assert ended(run, name)["reward"] == 3.0  # 1 + 2, and its end was not reached
    short = run.call("/conversations", {})["conversation"]
    whole = played(run, task["content"], "1?", "2?", name=short)
    run.reward(whole, None)
    assert ended(run, whole)["reward"] == 6.0
    [group] = run.end()
    assert [(each.env_reward, each.env_stop) for each in group.trajectories] == [(3.0, "ended"), (6.0, "solved")]
    assert [dict(each.env_metrics)["moves"] for each in group.trajectories] == [2.0, 3.0]
    assert all(dict(each.env_metrics)["closed"] == 1.0 for each in group.trajectories)
    run.host.close()


def test_what_the_environment_would_not_have_said_fails_by_name(
    world: Callable[..., EnvSpec], scorer: ScoringHost
) -> None:
    run = Run(samples=3, prompts=1, spec=world("Counting"), scorer=scorer)
    run.begin()
    task = run.call("/conversations", {"conversation": "a"})["messages"][0]["content"]
    for name in "bc":
        run.call("/conversations", {"conversation": name})
    for name, texts in {"a": (task, "7?"), "b": ("another task",), "c": (task, "1?", "2?", "and?")}.items():
        played(run, *texts, name=name)
        run.reward(name, None)
    failures = [ended(run, name)["why"] for name in "abc"]
    assert all("env_other_conversation" in each for each in failures)
    assert (
        "before turn 2 it says '1?'" in failures[0]
        and "POST /conversations" in failures[1]
        and "over after turn 3" in failures[2]
    )
    assert run.fails("/rewards", {"conversation": "a", "reward": None})[0] == 409
    [group] = run.end()
    assert {each.failure_reason for each in group.trajectories} == {"env_other_conversation"}
    run.host.close()


def test_other_observations_may_be_accepted(world: Callable[..., EnvSpec]) -> None:
    run = Run(samples=1, prompts=1, spec=world("Counting"), scorer=InlineHost(), compared=False)
    run.begin()
    name = played(run, "anything", "at all", "and", "more")
    run.reward(name, None)
    [group] = run.end()
    assert group.trajectories[0].env_reward == 6.0  # 1 + 2 + 3, and no step behind its end
    run.host.close()


def test_an_environment_that_asks_is_answered_with_the_conversation(
    world: Callable[..., EnvSpec], scorer: ScoringHost
) -> None:
    run = Run(samples=1, prompts=2, spec=world("Asking"), scorer=scorer)
    run.begin()
    assert run.call("/conversations", {"conversation": "a"})["messages"] == [{"role": "user", "content": "begin"}]
    played(run, "begin", "go on", name="a")
    played(run, "begin", name="b")  # not begun by a call, and too short
    for name in "ab":
        run.reward(name, None)
    assert ended(run, "a")["reward"] == 4.0  # "x0" and "x1"
    assert "it asks for a further turn after the 1 of the conversation" in ended(run, "b")["why"]
    reasons = [each.failure_reason for group in run.end() for each in group.trajectories]
    assert sorted(reasons) == ["", "env_other_conversation"]
    run.host.close()


def test_another_players_turns_cannot_be_answered(world: Callable[..., EnvSpec]) -> None:
    run = Run(samples=1, prompts=1, spec=world("Asking", trained=False), scorer=InlineHost())
    run.begin()
    run.reward(played(run, "begin", "go on"), None)
    [group] = run.end()
    assert "turns of another player" in group.trajectories[0].failure
    run.host.close()


@pytest.mark.parametrize(
    ("mode", "reason", "what"),
    [
        ("raises", "env_crashed", "ValueError: no such verdict"),
        ("dies", "env_crashed", "its process ended"),
        ("hangs", "env_timeout", "no answer to score in time"),
        ("nan", "env_invalid", "reward is nan instead of a finite number"),
    ],
)
def test_an_environment_that_fails_costs_its_conversation(
    mode: str, reason: str, what: str, world: Callable[..., EnvSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.backends.environments.processes.LOAD_S", 0.5 if mode == "hangs" else 60.0)
    host = ProcessHost(2, timeout_s=0.5 if mode == "hangs" else 20.0)
    run = Run(samples=1, prompts=1, spec=world("Judge", mode=mode), scorer=host)
    run.begin()
    name = played(run, "Q")
    run.reward(name, None)
    [group] = run.end()
    [trajectory] = group.trajectories
    assert trajectory.failure_reason == reason and what in trajectory.failure and name in trajectory.failure
    found = ended(run, name)
    assert found["state"] == "failed" and what in found["why"] and trajectory.turn_count == 1
    run.host.close()


def test_a_task_that_cannot_be_set_is_an_answer(world: Callable[..., EnvSpec]) -> None:
    run = Run(samples=1, prompts=1, spec=world("Judge", level="no such setting"), scorer=InlineHost())
    run.begin()
    status, why = run.fails("/conversations", {})
    assert status == 503 and "unexpected keyword argument 'level'" in why
    [group] = run.end()
    assert group.trajectories[0].failure_reason == "env_crashed"
    run.host.close()


def test_a_conversation_waits_for_an_environment_that_is_free(world: Callable[..., EnvSpec]) -> None:
    run = Run(samples=2, prompts=1, spec=world("Counting"), scorer=ProcessHost(1, timeout_s=20.0), wait_s=1.0)
    run.begin()
    while True:
        try:
            first = run.call("/conversations", {"conversation": "first"})["messages"][0]["content"]
            break
        except HTTPError as error:  # its environment's process has not started within a second
            assert error.code == 503
    status, why = run.fails("/conversations", {"conversation": "second"})
    assert status == 503 and "no environment was free for 1 s" in why
    run.reward(played(run, first, name="first"), None)
    assert ended(run, "first")["reward"] == 1.0
    run.call("/conversations", {"conversation": "second"})  # its name and its place are free again
    run.reward(played(run, first, name="second"), None)
    [group] = run.end()
    assert [each.env_reward for each in group.trajectories] == [1.0, 1.0]
    run.host.close()


def test_a_conversation_may_end_by_its_silence(world: Callable[..., EnvSpec]) -> None:
    scored = Run(samples=1, prompts=1, spec=world("Judge"), scorer=InlineHost(), ends_after_s=0.3)
    by_terms = Run(samples=1, prompts=1, ends_after_s=0.3)
    for run, reward in ((scored, 12.0), (by_terms, None)):
        run.begin()
        played(run, "Q")  # and no call: the program knows nothing of rewards
        [group] = run.end()
        assert (group.trajectories[0].env_reward, group.trajectories[0].failure_reason) == (reward, "")
        run.host.close()


def test_completions_are_scored_as_texts(world: Callable[..., EnvSpec]) -> None:
    run = Run(samples=1, prompts=2, spec=world("Judge"), scorer=InlineHost())
    run.begin()
    for name, prompt in {"text": "Ab", "ids": [65, 98]}.items():
        run.call("/v1/completions", {"prompt": prompt, "stop": ["0"]}, X_Conversation_Id=name)
        run.reward(name, None)
    assert [dict(group.trajectories[0].env_metrics)["read"] for group in run.end()] == [2.0, 2.0]
    run.host.close()


def test_a_score_that_a_kill_took_is_named_when_the_run_is_resumed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, saved_step=0)
    journal.begun("mine", "p0/0")
    journal.ended("mine", "scoring", "", None)
    journal.close()
    resumed = Journal(tmp_path, saved_step=0)
    assert "its environment had not scored it" in resumed.told("mine") and "1 without a reward" in resumed.summary()
    resumed.close()
