"""Environments of the package verifiers: quick tests with a stand-in of its interface, a slow one with the package itself.

With POSTTRAIN_VERIFIERS_PYTHON (a Python that has verifiers; `make verifiers-env` makes one) the slow test trains on it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.envs.agent import AgentFailed
from posttrain.envs.verifiers import verifiers
from posttrain.envs.verifiers.process import bridge_of
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep
from posttrain.plan.environments.verifiers import verifiers as check

PYTHON = os.environ.get("POSTTRAIN_VERIFIERS_PYTHON", "")
KINDS = ("single", "multi", "tool", "stateful")
# The part of the package that is called, and an environment that asks twice.
STAND_IN = """
class Config:
    def __init__(self, api_base_url, api_key_var, max_retries):
        self.url, self.key = api_base_url, api_key_var
"""
WORLD = """
import json, os, urllib.request
print("environments print")
class World:
    def __init__(self, mode): self.mode = mode
    def get_dataset(self): return [{"q": "a"}, {"q": "b"}, {"q": "c"}]
    def get_eval_dataset(self): return [{"q": "held out"}]
    async def run_rollout(self, row, client, model, sampling_args):
        if self.mode == "dies": os._exit(3)
        messages = [{"role": "user", "content": row["q"]}]
        for _ in range(2):
            body = json.dumps({"model": model, "messages": messages}).encode()
            headers = {"Authorization": "Bearer " + os.environ[client.key], "Content-Type": "application/json"}
            request = urllib.request.Request(client.url + "/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                messages.append(json.load(answer)["choices"][0]["message"])
            messages.append({"role": "user", "content": "And?"})
        if self.mode == "fails": return {"error": "no tool"}
        return {"reward": 0.5, "metrics": {"pid": float(os.getpid()), "bad": float("nan")}, "error": None}
def load_environment(mode="plays"): return World(mode)
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "site").mkdir()
    package = tmp_path / "site" / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0'\n")
    (package / "types.py").write_text(STAND_IN + "ClientConfig = Config\n")
    (tmp_path / "world.py").write_text(WORLD)
    # A Python of its own that finds the stand-in.
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    yield tmp_path
    bridge_of(str(program)).kill()


class Driven:
    def __init__(self, world: Path, seed: int, **settings: Any):
        spec = EnvSpec(name="verifiers", max_turns=4)
        self.env = verifiers(spec, env=str(world / "world.py"), python=str(world / "python"), **settings)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.env.begin(seed, self.events.put)

    def next(self) -> Any:
        return self.events.get(timeout=30)

    def answer(self, asked: EnvAsk, text: str) -> None:
        self.env.answer(asked.turn, text, cut=False, prompt_tokens=1, response_tokens=1)


def play(world: Path, seed: int, **settings: Any) -> tuple[list[EnvAsk], Any, dict[str, float]]:
    driven = Driven(world, seed, **settings)
    asked = []
    event = driven.next()
    while isinstance(event, EnvAsk):
        asked.append(event)
        driven.answer(event, "yes")
        event = driven.next()
    return asked, event, dict(driven.env.close())


def test_an_environment_plays_its_rows_and_scores_them(world: Path) -> None:
    asked, end, first = play(world, 1_000_004)
    assert [list(each.messages) for each in asked] == [
        [{"role": "user", "content": "b"}],  # row 4 of three: the second again
        [{"role": "user", "content": "And?"}],  # goes on behind the sampled tokens
    ]
    assert end == EnvStep(done=True, stop="ended", reward=0.5)
    assert "bad" not in first and first["num_actions"] == 2
    asked, _, second = play(world, 0)
    assert asked[0].messages == [{"role": "user", "content": "held out"}]
    assert first["pid"] == second["pid"], "one process serves all episodes"


def test_failures_cost_their_own_episode(world: Path) -> None:
    _, failure, _ = play(world, 0, options={"mode": "fails"})
    assert isinstance(failure, AgentFailed) and str(failure) == "no tool"
    _, failure, _ = play(world, 0, options={"mode": "dies"})
    assert isinstance(failure, AgentFailed) and "exit code 3" in str(failure)
    _, failure, _ = play(world, 0, options={"node": 1})
    assert isinstance(failure, AgentFailed) and "unexpected keyword argument 'node'" in str(failure)
    driven = Driven(world, 0)
    driven.next()
    driven.env.close()  # in the middle: its process is ended, and the next episode starts another
    assert play(world, 0)[1].reward == 0.5


def test_another_interface_of_the_package_is_named(world: Path) -> None:
    (world / "site" / "verifiers" / "types.py").write_text("")
    _, failure, _ = play(world, 0)
    assert isinstance(failure, AgentFailed) and "verifiers 0 has another interface" in str(failure)


def test_what_is_missing_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_VERIFIERS_PYTHON", raising=False)
    [problem] = check({"env": "wordle"}, "environment.settings")
    assert "needs a Python of its own" in problem.what and problem.field == "environment.settings.python"
    with pytest.raises(ConfigError, match="needs a Python of its own"):
        verifiers(EnvSpec(name="verifiers"), env="wordle")
    problems = list(check({"env": str(tmp_path / "none.py"), "python": "/no/python"}, "environment.settings"))
    assert [problem.field for problem in problems] == ["environment.settings.python", "environment.settings.env"]
    assert list(check({"env": "wordle", "python": sys.executable}, "environment.settings")) == []


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VERIFIERS_PYTHON names no Python with verifiers")
def test_a_run_trains_on_environments_of_the_package(tmp_path: Path, tiny_llama: Path) -> None:
    import posttrain

    envs = str(Path(__file__).with_name("verifiers_envs.py"))
    named = {
        kind: {"name": "verifiers", "settings": {"env": envs, "python": PYTHON, "options": {"kind": kind}}}
        for kind in KINDS
    }
    config = {
        "run": {"folder": str(tmp_path / "run"), "total_steps": 1},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [], "prompts_per_step": 4, "max_prompt_tokens": 600},
        "environment": {"named": named, "max_turns": 3, "train_episodes": 4, "workers": 2},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 12},
        "policy": {"sequences_per_mini_batch": 8},
        "validation": {"before_training": False, "after_training": False},
        "checkpoint": {"at_end": False},
        "tracking": {"batches_every_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = posttrain.train(tmp_path / "run.yaml")
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert {line["data_source"] for line in lines} == {*KINDS}
    assert all(line["invalid"] is None and line["environment"]["stop"] == "ended" for line in lines), lines
    # A random model calls no tool and says no word: one turn, but where the environment goes on.
    turns = {line["data_source"]: len(line["turns"]) for line in lines}
    assert turns == {"single": 1, "multi": 3, "tool": 1, "stateful": 1}
    # The tokens that were sampled are those that are trained: their log-probs agree.
    assert run.metric("gap/max")[1] < 1e-4
