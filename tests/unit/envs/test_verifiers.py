"""Environments of the package verifiers: quick tests with a stand-in of its interface, slow ones with the package itself.

With POSTTRAIN_VERIFIERS_PYTHON (a Python that has verifiers before 0.4) and POSTTRAIN_TASKSETS_PYTHON (one that has 0.4, and uv;
`make verifiers-env` makes both) the slow tests train on them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.backends.environments.make import HostedEpisode
from posttrain.backends.environments.scoring import OtherConversation
from posttrain.envs.agent import AgentFailed
from posttrain.envs.agent.bridged import bridge_of
from posttrain.envs.verifiers import BRIDGE, verifiers
from posttrain.envs.verifiers.tasksets import block_of
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep, FinishedConversation, PlayedTurn
from posttrain.libraries.prime_rl import PlayedEnv, Sources, sources
from posttrain.plan.environments.verifiers import verifiers as check

PYTHON = os.environ.get("POSTTRAIN_VERIFIERS_PYTHON", "")
TASKSETS = os.environ.get("POSTTRAIN_TASKSETS_PYTHON", "")
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
    bridge_of(str(program), BRIDGE, "verifiers").kill()


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


def test_an_environment_scores_the_conversation_of_a_program_outside(world: Path) -> None:
    def hosted(number: int) -> HostedEpisode:
        settings = {"env": str(world / "world.py"), "python": str(world / "python")}
        return HostedEpisode(EnvSpec(name="verifiers", settings=settings, max_turns=4), number)

    env = hosted(1_000_001)
    [task] = env.task()["messages"]
    assert task == {"role": "user", "content": "b"}
    turns = [PlayedTurn(read=[task], action="yes"), PlayedTurn(read=[{"role": "user", "content": "And?"}], action="no")]
    assert env.score(FinishedConversation(messages=[], turns=turns))["reward"] == 0.5
    assert env.close()["metrics"]["num_actions"] == 2
    other = hosted(1_000_000)  # whose task is another row
    with pytest.raises(OtherConversation, match="before turn 1 it says 'a'"):
        other.score(FinishedConversation(messages=[], turns=turns))
    other.close()


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


PRIME_RL = """
max_steps = 20
[orchestrator]
batch_size = 128
[[orchestrator.train.source]]
ratio = 0.3
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[orchestrator.train.source.env.agent.harness]
id = "null"
[[orchestrator.train.source]]
name = "sorting"
[orchestrator.train.source.env]
id = "user-sim"
[orchestrator.train.source.env.taskset]
id = "alphabet-sort"
min_turns = 3
[[orchestrator.eval.source]]
name = "sorting"
num_examples = 64
[orchestrator.eval.source.env.taskset]
id = "alphabet-sort"
min_turns = 5
"""


def test_files_of_prime_rl_name_environments(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(PRIME_RL)
    found = sources(str(file), "reverse-text", {"dataset_split": "test"})
    block = {"taskset": {"id": "reverse-text"}, "agent": {"harness": {"id": "null"}}}
    assert found == Sources(*[PlayedEnv(block, {"dataset_split": "test"})] * 2)
    found = sources(str(file), "sorting", {})
    sorting = {"id": "user-sim", "taskset": {"id": "alphabet-sort", "min_turns": 3}}
    assert found.training.env == sorting and found.validation.env == {
        "taskset": {"id": "alphabet-sort", "min_turns": 5}
    }
    for name, why in ((None, "has 2 sources"), ("sortin", "has no source 'sortin'")):
        with pytest.raises(ConfigError, match=why):
            sources(str(file), name, {})
    [problem] = check({"env": str(file), "source": "x", "python": sys.executable}, "environment.settings")
    assert problem.field == "environment.settings.source" and "reverse-text, sorting" in problem.fix


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # prime-rl in 2025: the id and the arguments of load_environment
        ('[[orchestrator.env]]\nid = "wordle"\nargs = {turns = 3}', PlayedEnv("wordle", {"turns": 3})),
        ('[[env]]\nid = "wordle"\nname = "w"', PlayedEnv("wordle")),
        ('[[orchestrator.train.env]]\nratio = 0.5\ntaskset = {id = "w"}', PlayedEnv({"taskset": {"id": "w"}})),
    ],
)
def test_older_files_of_prime_rl(tmp_path: Path, text: str, found: PlayedEnv) -> None:
    (tmp_path / "rl.toml").write_text(text)
    assert sources(str(tmp_path / "rl.toml"), None, {}) == Sources(found, found)


@pytest.mark.parametrize("text", ["", "max_steps = 1", "[orchestrator]\nbatch_size = 1", "env = 3", "[["])
def test_files_without_a_source(tmp_path: Path, text: str) -> None:
    (tmp_path / "rl.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"has no source of training|cannot be read"):
        sources(str(tmp_path / "rl.toml"), None, {})
    for block in ({}, {"taskset": {}}, {"taskset": 3}, {"env": {"agent": {}}}):
        with pytest.raises(ConfigError, match="the block names no taskset"):
            sources(block, None, {})


def test_a_taskset_in_a_file_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "my-words" / "my_words").mkdir(parents=True)
    assert block_of("reverse-text", {"n": 1}) == {"taskset": {"id": "reverse-text", "n": 1}}
    block = {"taskset": {"id": str(tmp_path / "my-words"), "n": 1}, "agent": {}}
    assert block_of(block, {"n": 2}) == {"taskset": {"id": "my_words", "n": 2}, "agent": {}}
    assert sys.path[0] == os.environ["PYTHONPATH"] == str(tmp_path / "my-words")  # tool servers import it, too
    assert block_of(str(tmp_path / "game.py"), {})["taskset"]["id"] == "game" and sys.path[0] == str(tmp_path)


def trained_on(named: dict[str, Any], folder: Path, model: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Train a step on environments. Returns: the run, and its samples."""
    import posttrain

    config = {
        "run": {"folder": str(folder / "run"), "total_steps": 1},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [], "prompts_per_step": len(named), "max_prompt_tokens": 600},
        "environment": {"named": named, "max_turns": 3, "train_episodes": len(named), "workers": 2, "timeout_s": 300},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 12},
        "policy": {"sequences_per_mini_batch": 2 * len(named)},
        "validation": {"before_training": False, "after_training": False},
        "checkpoint": {"at_end": False},
        "tracking": {"batches_every_steps": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    run = posttrain.train(folder / "run.yaml")
    lines = (folder / "run" / "samples" / "step_1.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VERIFIERS_PYTHON names no Python with verifiers")
def test_a_run_trains_on_environments_of_the_package(tmp_path: Path, tiny_llama: Path) -> None:
    envs = str(Path(__file__).with_name("verifiers_envs.py"))
    named = {
        kind: {"name": "verifiers", "settings": {"env": envs, "python": PYTHON, "options": {"kind": kind}}}
        for kind in KINDS
    }
    run, lines = trained_on(named, tmp_path, tiny_llama)
    assert {line["data_source"] for line in lines} == {*KINDS}
    assert all(line["invalid"] is None and line["environment"]["stop"] == "ended" for line in lines), lines
    # A random model calls no tool and says no word: one turn, but where the environment goes on.
    turns = {line["data_source"]: len(line["turns"]) for line in lines}
    assert turns == {"single": 1, "multi": 3, "tool": 1, "stateful": 1}
    # The tokens that were sampled are those that are trained: their log-probs agree.
    assert run.metric("gap/max")[1] < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VERIFIERS_PYTHON names no Python with verifiers")
def test_rubrics_score_conversations_of_programs_outside() -> None:
    """What a program has played with the policy: one turn, three turns, a tool whose results it gave itself."""
    file = str(Path(__file__).with_name("verifiers_envs.py"))
    call = '<tool_call>{"name": "shout", "arguments": {"word": "red"}}</tool_call>'
    played = {"single": ["red!"], "multi": ["red", "red again", "red"], "tool": [call, "It said red."]}
    read = {"multi": ["Again.", "Again."], "tool": ["RED!"]}
    for kind, actions in played.items():
        settings = {"env": file, "python": PYTHON, "options": {"kind": kind}}
        env = HostedEpisode(EnvSpec(name="verifiers", settings=settings, max_turns=4), 1_000_000)
        task = env.task()
        assert [message["content"] for message in task["messages"]][-1] == "Say red." and bool(task["tools"]) == (
            kind == "tool"
        )
        seen = [task["messages"], *([{"role": "user", "content": text}] for text in read.get(kind, ()))]
        turns = [PlayedTurn(read=each, action=action) for each, action in zip(seen, actions, strict=True)]
        found = env.score(FinishedConversation(messages=[], turns=turns))
        assert found["reward"] == 1.0, kind
        assert env.close()["metrics"]["spoken"] == len(actions)
    bridge_of(PYTHON, BRIDGE, "verifiers").kill()


@pytest.mark.slow
@pytest.mark.skipif(not TASKSETS, reason="POSTTRAIN_TASKSETS_PYTHON names no Python with verifiers 0.4")
def test_a_run_trains_on_tasksets(tmp_path: Path, tiny_llama: Path) -> None:
    script = tmp_path / "harness.py"
    script.write_text('# /// script\n# dependencies = ["mcp==2.0.0"]\n# ///\n')
    if subprocess.run([Path(TASKSETS).with_name("uv"), "sync", "--script", script, "-q", "--no-config"]).returncode:
        pytest.skip("uv cannot install what the programs of verifiers need")
    here = Path(__file__).with_name("tasksets")
    scripted = {
        "taskset": {"id": str(here / "words.py"), "scripted": True},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    settings: dict[str, dict[str, Any]] = {
        "chat": {"env": str(here / "words.py")},
        "scripted": {"env": scripted},
        "tools": {"env": str(here / "words.py"), "options": {"task": {"loud": True}}},
        "first": {"env": str(here / "rivals.py")},
        "second": {"env": str(here / "rivals.py"), "trained": "second"},
    }
    named = {name: {"name": "verifiers", "settings": {**each, "python": TASKSETS}} for name, each in settings.items()}
    run, lines = trained_on(named, tmp_path, tiny_llama)
    assert all(line["invalid"] is None and line["environment"]["stop"] == "ended" for line in lines), lines
    # Of a game the trained seat alone is trained, with its own reward.
    found = {line["data_source"]: (len(line["turns"]), line["reward"]) for line in lines}
    assert found == {"chat": (1, 0.5), "scripted": (3, 0.5), "tools": (1, 0.5), "first": (2, 1.0), "second": (2, -1.0)}
    assert run.metric("gap/max")[1] < 1e-4
