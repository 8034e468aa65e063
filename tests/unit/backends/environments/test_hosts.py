"""Environments that hang, crash and talk nonsense, in processes of their own and in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.environments.make import _plain_event, event_of
from posttrain.backends.environments.processes import ProcessHost
from posttrain.backends.environments.start import built_in_tools
from posttrain.interfaces.env import EnvAsk, EnvEvent, EnvFailed, EnvHost, EnvSpec, EnvStart, EnvStep, TurnOptions
from posttrain.processes import proc

WORLD = '''
import asyncio, os, random, signal, subprocess, sys, time
from posttrain.interfaces.env import EnvStart, EnvStep

IMPORTED_BY = os.getpid()

class World:
    """Does what it is told."""

    def __init__(self, spec, greeting="hello"):
        if greeting == "broken":
            raise ValueError("this world cannot be made")
        self.greeting, self.spec, self.said = greeting, spec, []

    def reset(self, seed):
        return EnvStart(messages=[{"role": "user", "content": f"{self.greeting} {seed} {random.random():.6f}"}])

    def step(self, action):
        self.said.append(action)
        if action == "hang":
            time.sleep(600)
        if action == "wait":
            time.sleep(0.3)
        if action == "exit":
            sys.exit(3)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "raise":
            raise KeyError("no such key")
        if action == "child":
            subprocess.Popen(["sleep", "600"])
        if action == "none":
            return None
        if action == "nan":
            return EnvStep(reward=float("nan"))
        if action == "done":
            return EnvStep(done="yes")
        if action == "role":
            return EnvStep(messages=["hello"])
        if action == "object":
            return EnvStep(messages=[{"role": "user", "content": object()}])
        if action == "later":
            return self.later()
        if action == "variables":
            with open("/proc/self/environ") as file:
                started_with = [each.partition("=")[0] for each in file.read().split(chr(0))]
            return EnvStep(messages=[{"role": "user", "content": " ".join({*os.environ, *started_with})}])
        if action == "take":
            self.held = b"x" * (1 << 30)
        if action == "children take":
            code = "import time; held = b'x' * (150 << 20); time.sleep(600)"
            children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
            children[0].wait()
        if action == "pid":
            return EnvStep(messages=[{"role": "user", "content": f"{os.getpid()} {IMPORTED_BY}"}])
        return EnvStep(messages=[{"role": "user", "content": action.upper()}], reward=1, metrics={"moves": 1})

    async def later(self):
        await asyncio.sleep(0.01)
        return EnvStep(messages=[{"role": "user", "content": "LATER"}])

    def close(self):
        return {"said": len(self.said)}
'''


@pytest.fixture
def spec(tmp_path: Path) -> EnvSpec:
    (tmp_path / "world.py").write_text(WORLD)
    return EnvSpec(name=f"{tmp_path}/world.py:World", messages=({"role": "user", "content": "q"},), row={"seed": 3})


@pytest.fixture(params=["processes", "inline"])
def host(request: pytest.FixtureRequest) -> Iterator[EnvHost]:
    made: EnvHost = ProcessHost(2, timeout_s=20.0) if request.param == "processes" else InlineHost()
    yield made
    made.close()


@pytest.fixture
def processes() -> Iterator[ProcessHost]:
    made = ProcessHost(2, timeout_s=1.0)
    yield made
    made.close()


def next_event(host: EnvHost, episode: str) -> EnvEvent:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for name, event in host.wait(5.0):
            assert name == episode
            return event
    raise TimeoutError


def begun(host: EnvHost, spec: EnvSpec, episode: str = "e") -> EnvStart:
    host.start(episode, spec, 5)
    event = next_event(host, episode)
    assert isinstance(event, EnvStart), event
    return event


def failure(host: EnvHost, spec: EnvSpec, action: str) -> EnvFailed:
    begun(host, spec)
    host.step("e", action)
    event = next_event(host, "e")
    assert isinstance(event, EnvFailed), event
    return event


def test_an_episode(host: EnvHost, spec: EnvSpec) -> None:
    # random.seed(5) then random(): 0.622902 (Python's Mersenne Twister)
    assert begun(host, spec).messages == [{"role": "user", "content": "hello 5 0.622902"}]
    host.step("e", "up")
    step = next_event(host, "e")
    assert step == EnvStep(messages=[{"role": "user", "content": "UP"}], reward=1.0, metrics={"moves": 1.0})
    host.step("e", "later")
    step = next_event(host, "e")
    assert isinstance(step, EnvStep) and step.messages[0]["content"] == "LATER"
    host.finish("e")
    assert next_event(host, "e") == {"said": 2.0}
    assert host.wait(0.0) == []


@pytest.mark.parametrize(
    ("action", "reason", "said"),
    [
        ("raise", "env_crashed", "no such key"),
        ("none", "env_invalid", "world.py:7)"),
        ("nan", "env_invalid", "reward is nan instead of a finite number"),
        ("done", "env_invalid", "done is 'yes' instead of True or False"),
        ("role", "env_invalid", "messages holds 'hello', which is no message with a role"),
    ],
)
def test_what_an_environment_does_wrong_has_a_name(
    host: EnvHost, spec: EnvSpec, action: str, reason: str, said: str
) -> None:
    found = failure(host, spec, action)
    assert found.reason == reason and said in found.detail
    assert begun(host, spec, "another").messages  # in the same process, where there is one


def test_a_world_that_cannot_be_made(host: EnvHost, spec: EnvSpec) -> None:
    host.start("e", EnvSpec(name=spec.name, settings={"greeting": "broken"}), 5)
    event = next_event(host, "e")
    assert isinstance(event, EnvFailed) and "this world cannot be made" in event.detail


def test_code_that_cannot_be_imported_is_known_before_the_first_episode(
    host: EnvHost, spec: EnvSpec, tmp_path: Path
) -> None:
    broken, leaving = tmp_path / "broken.py", tmp_path / "leaving.py"
    broken.write_text("x = 1\nimport no_such_library\n")
    leaving.write_text("raise SystemExit(3)\n")
    failures = host.load([spec.name, "single_turn", f"{broken}:World", f"{leaving}:World"])
    assert list(failures) == [f"{broken}:World", f"{leaving}:World"]
    assert "No module named 'no_such_library'" in failures[f"{broken}:World"] and "broken.py:2" in str(failures)
    assert failures[f"{leaving}:World"].startswith("SystemExit: 3")
    assert begun(host, spec).messages


def test_code_that_ends_the_process_that_imports_it(processes: ProcessHost, tmp_path: Path) -> None:
    file = tmp_path / "ending.py"
    file.write_text("import os\nos._exit(7)\n")
    assert processes.load([f"{file}:World"]) == {f"{file}:World": "importing ended its process: exit code 7"}


def test_the_environments_of_plug_ins_are_known_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = "from posttrain.interfaces.env import EnvStart\nfrom posttrain.registry import ENVS\n"
    world += "@ENVS.register('plugged_world')\nclass Plugged:\n    def __init__(self, spec): ...\n"
    world += "    def reset(self, seed): return EnvStart(messages=[{'role': 'user', 'content': 'here'}])\n"
    (tmp_path / "plugged_worlds.py").write_text(world)
    monkeypatch.syspath_prepend(str(tmp_path))
    host = ProcessHost(1, timeout_s=20.0, names=["plugged_world"], modules=["plugged_worlds"])
    try:
        assert host.load(["plugged_world"]) == {}
        assert begun(host, EnvSpec(name="plugged_world")).messages == [{"role": "user", "content": "here"}]
    finally:
        host.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "there is no environment called 'nowhere'"),
        ("no_such_package.worlds:World", "there is no module no_such_package.worlds"),
        ("missing.py:World", "there is no file missing.py"),
        ("posttrain.envs.single_turn:Many", "posttrain.envs.single_turn has no class Many"),
    ],
)
def test_names_that_lead_nowhere(host: EnvHost, name: str, said: str) -> None:
    host.start("e", EnvSpec(name=name), 5)
    event = next_event(host, "e")
    assert isinstance(event, EnvFailed) and said in event.detail


@pytest.mark.parametrize(
    ("action", "reason", "said"),
    [
        ("hang", "env_timeout", "no answer to step in time (environment.timeout_s is 1)"),
        ("die", "env_crashed", "signal SIGKILL"),
        ("exit", "env_crashed", "SystemExit: 3"),
        ("object", "env_crashed", "a object cannot be handed to another process"),
    ],
)
def test_a_process_that_hangs_or_ends_costs_its_own_episode(
    processes: ProcessHost, spec: EnvSpec, action: str, reason: str, said: str
) -> None:
    begun(processes, spec, "neighbour")
    found = failure(processes, spec, action)
    assert found.reason == reason and said in found.detail
    processes.step("neighbour", "up")
    step = next_event(processes, "neighbour")
    assert isinstance(step, EnvStep) and step.messages[0]["content"] == "UP"
    begun(processes, spec, "next")


def test_episodes_wait_for_room(processes: ProcessHost, spec: EnvSpec) -> None:
    for episode in "abc":
        processes.start(episode, spec, 5)
    found: list[str] = []
    while len(found) < 2:
        found += [name for name, _ in processes.wait(5.0)]
    assert sorted(found) == ["a", "b"] and processes.wait(0.0) == []
    processes.finish("a")
    names = [name for _ in range(2) for name, _ in processes.wait(5.0)]
    assert names == ["a", "c"]


def test_a_row_that_cannot_cross(processes: ProcessHost, spec: EnvSpec) -> None:
    processes.start("e", EnvSpec(name=spec.name, row={"what": object()}), 5)
    event = next_event(processes, "e")
    assert isinstance(event, EnvFailed) and event.reason == "env_invalid"


def test_what_is_dropped_or_abandoned_is_not_told(processes: ProcessHost, spec: EnvSpec) -> None:
    begun(processes, spec, "a")
    processes.drop("a")
    assert processes.wait(0.3) == []
    processes.start("b", spec, 5)
    processes.abandon()
    assert processes.wait(0.3) == []
    begun(processes, spec, "c")


@pytest.mark.parametrize("action", ["wait", "raise"])
def test_an_episode_that_is_dropped_at_work_leaves_its_answer_to_no_other(
    processes: ProcessHost, spec: EnvSpec, action: str
) -> None:
    """The process answers the step and then the close; the episode that follows in it gets neither."""
    begun(processes, spec, "neighbour")
    for number in range(3):
        begun(processes, spec, f"dropped{number}")
        processes.step(f"dropped{number}", action)
        processes.drop(f"dropped{number}")
        begun(processes, spec, f"next{number}")
        processes.step(f"next{number}", "up")
        step = next_event(processes, f"next{number}")
        assert isinstance(step, EnvStep) and step.messages[0]["content"] == "UP"
        processes.finish(f"next{number}")
        assert not isinstance(next_event(processes, f"next{number}"), EnvFailed)


def test_an_episode_that_is_dropped_before_it_began_takes_no_room(processes: ProcessHost, spec: EnvSpec) -> None:
    begun(processes, spec, "a")
    begun(processes, spec, "b")
    processes.start("waits", spec, 5)
    processes.drop("waits")
    processes.finish("a")
    next_event(processes, "a")
    begun(processes, spec, "c")


def test_processes_end_with_their_host(spec: EnvSpec) -> None:
    host = ProcessHost(1, timeout_s=5.0)
    begun(host, spec)
    host.step("e", "child")
    next_event(host, "e")
    pids = [worker.pid for worker in host._workers]
    host.close()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_environment_sees_no_secret_that_the_configuration_does_not_name(
    spec: EnvSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "JUDGE_KEY", "TOOL_KEY"):
        monkeypatch.setenv(name, "secret")
    host = ProcessHost(1, timeout_s=20.0, variables=["TOOL_KEY"])
    try:
        begun(host, spec)
        host.step("e", "variables")
        step = next_event(host, "e")
        assert isinstance(step, EnvStep)
        seen = set(str(step.messages[0]["content"]).split())
        assert "PATH" in seen and seen & {"WANDB_API_KEY", "JUDGE_KEY", "TOOL_KEY"} == {"TOOL_KEY"}
    finally:
        host.close()


@pytest.mark.parametrize("action", ["take", "children take"])
def test_an_environment_that_takes_too_much_memory_costs_its_own_episode(spec: EnvSpec, action: str) -> None:
    """At once by itself (the kernel refuses it), or with processes of which none is too large alone (the server counts)."""
    host = ProcessHost(2, timeout_s=30.0, memory_gib=0.25)
    try:
        begun(host, spec, "neighbour")
        assert failure(host, spec, action).reason == "env_memory"
        host.step("neighbour", "up")
        assert isinstance(next_event(host, "neighbour"), EnvStep)
        begun(host, spec, "next")
    finally:
        host.close()


def pids_of(host: ProcessHost, spec: EnvSpec) -> list[tuple[int, int]]:
    """Per episode of two that live at once: its process, and the process that has imported the user's file."""
    found = []
    for episode in "ab":
        begun(host, spec, episode)
        host.step(episode, "pid")
        step = next_event(host, episode)
        assert isinstance(step, EnvStep)
        own, imported_by = str(step.messages[0]["content"]).split()
        found.append((int(own), int(imported_by)))
    return found


def test_the_users_own_file_is_imported_once(spec: EnvSpec) -> None:
    host = ProcessHost(2, timeout_s=20.0, own=[spec.name])
    try:
        (first, importer), (second, same) = pids_of(host, spec)
        assert first != second and importer == same and importer not in (first, second)
    finally:
        host.close()


def test_a_trainer_that_is_killed_while_a_file_is_imported_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'importing')!r}, 'w').close()\nwhile True: pass\n")
    name = f"{tmp_path}/endless.py:World"
    code = (
        "from posttrain.backends.environments.processes import ProcessHost; from posttrain.interfaces.env import EnvSpec\n"
        f"ProcessHost(1, 60.0, own=[{name!r}]).start('e', EnvSpec(name={name!r}), 0)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not (tmp_path / "importing").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    servers = proc.descendants(trainer.pid)
    assert servers
    trainer.kill()
    trainer.wait()
    while any(proc.state(pid) != "gone" for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [proc.state(pid) for pid in servers] == ["gone"] * len(servers)


def unshared_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def test_processes_share_what_the_users_file_loads(spec: EnvSpec) -> None:
    """64 MiB of it: each process holds at most 15 MiB of its own."""
    file = Path(spec.name.partition(":")[0])
    file.write_text(f"LOADED = [bytes([each % 256]) * 4096 for each in range(16384)]\n{file.read_text()}")
    host = ProcessHost(8, timeout_s=20.0, own=[spec.name])
    try:
        for number in range(8):
            begun(host, spec, f"{number}")
        held = [unshared_mib(worker.pid) for worker in host._workers]
        assert len(held) == 8 and max(held) < 15
    finally:
        host.close()


@pytest.mark.parametrize(
    "beginning",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "import subprocess; subprocess.Popen(['sleep', '600'])",
        "import os, pathlib; seen = pathlib.Path(__file__ + '.seen'); seen.exists() or (seen.touch(), os._exit(5))",
    ],
)
def test_a_file_that_cannot_be_imported_before_a_fork_is_imported_in_every_worker(
    spec: EnvSpec, beginning: str
) -> None:
    """It starts a thread or a process, which a fork would not take along, or ends the process that imports it."""
    file = Path(spec.name.partition(":")[0])
    file.write_text(f"{beginning}\n{file.read_text()}")
    host = ProcessHost(2, timeout_s=20.0, own=[spec.name])
    try:
        (first, importer), (second, other) = pids_of(host, spec)
        assert (first, second) == (importer, other) and first != second
    finally:
        host.close()


UNSHARED = 15 << 20  # bytes that a worker may hold alone


@pytest.mark.parametrize(
    ("name", "tools"),
    [("sokoban", []), ("tools", ["calculator", "python"]), ("tools", [{"name": "search", "corpus": "wiki.jsonl"}])],
)
def test_a_worker_costs_little_memory(
    name: str, tools: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries and indices are loaded before the fork, and torch is not among them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wiki.jsonl").write_text("".join(f'{{"text": "passage {n} of {n % 7}"}}\n' for n in range(500)))
    settings = {"tools": tools} if tools else {}
    host = ProcessHost(2, timeout_s=60.0, names=[name], tools=built_in_tools(settings))
    try:
        for episode in ("a", "b"):
            host.start(episode, EnvSpec(name=name, settings=settings, messages=({"role": "user", "content": "q"},)), 0)
        begun = [event for _ in range(2) for _, event in host.wait(60.0)]
        assert all(isinstance(event, EnvStart) for event in begun), begun
        for worker in host._workers:
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
            held = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
            assert held < UNSHARED, f"{held >> 20} MiB"
        assert not proc.mapped_files([host._workers[0].pid], str(Path(torch.__file__).parent))
    finally:
        host.close()


def test_the_options_of_a_turn_come_through_a_process_whole() -> None:
    given = TurnOptions(
        stop=("a", "b"),
        seed=3,
        draws_as="x",
        top_logprobs=2,
        prompt_logprobs=True,
        temperature=0.5,
        grammar="g",
        tokens=True,
    )
    usual = TurnOptions()
    # Every option is given here: a new one has to be carried, too
    assert all(getattr(given, each.name) != getattr(usual, each.name) for each in fields(TurnOptions))
    for options in (given, usual):
        asked = EnvAsk(turn="1", line=0, messages=[{"role": "user", "content": "a"}], options=options)
        found = event_of(json.loads(json.dumps(_plain_event(asked))))
        assert isinstance(found, EnvAsk) and found.options == options
    for wrong in ({"temperature": 0}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_logprobs": -1}):
        plain = _plain_event(EnvAsk(turn="1", line=0, messages=[], options=given))
        plain["ask"]["options"] |= wrong
        assert isinstance(event_of(plain), EnvFailed), wrong
