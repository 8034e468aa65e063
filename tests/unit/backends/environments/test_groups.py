"""Episodes of a group in one process: they begin alike, wait for each other, and other groups do not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.managed_fork import MANAGERS, managed_fork

from posttrain.backends.environments.groups import GroupHost, SeatedHost
from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvSpec, EnvStart, EnvStep
from posttrain.records.trajectories import SamplingParams

pytestmark = pytest.mark.usefixtures("warm_children")

CONFIG = {"env": {"env_name": "letters", "letters": "abcd", "seed": 7}, "data": {}}


@pytest.fixture
def host() -> Iterator[GroupHost]:
    with closing(GroupHost(SeatedHost(2, 30.0, ["env_manager"]))) as found:
        yield found


def spec(folder: Path, text: str = MANAGERS) -> EnvSpec:
    managed_fork(folder, managers=text)
    settings = {
        "file": str(folder / "plays/worlds/managers.py"),
        "folder": str(folder),
        "function": "make_worlds",
        "config": CONFIG,
    }
    sampling = SamplingParams(max_response_tokens=4, samples_per_prompt=2)
    return EnvSpec(name="env_manager", settings=settings, max_turns=3, sampling=sampling)


def some(host: GroupHost, count: int) -> dict[str, EnvEvent]:
    found: dict[str, EnvEvent] = {}
    while len(found) < count:
        found |= dict(host.wait(30.0))
    return found


def test_a_group_waits_for_its_own_episodes_alone(host: GroupHost, tmp_path: Path) -> None:
    played = spec(tmp_path)
    for name in ("p/0", "p/1", "q/0", "q/1"):
        host.start(name, played, 1)
    assert all(isinstance(each, EnvStart) for each in some(host, 4).values())
    host.step("p/0", "?")
    host.step("q/0", "?")
    host.step("q/1", "?")
    assert {*some(host, 2)} == {"q/0", "q/1"}
    host.step("p/1", "?")
    assert {*some(host, 2)} == {"p/0", "p/1"}
    host.drop("p/1")  # the other goes on without it
    host.step("p/0", "?")
    (answer,) = some(host, 1).items()
    assert answer[0] == "p/0" and isinstance(answer[1], EnvStep) and not answer[1].done
    host.finish("p/0")
    assert some(host, 1) == {"p/0": {}}


def test_equal_places_give_equal_starts_whatever_the_groups_before_were_called(tmp_path: Path) -> None:
    found = []
    played = spec(tmp_path)
    for names in (("p", "q", "r"), ("x", "y", "z")):
        won = []
        with closing(GroupHost(SeatedHost(2, 30.0, ["env_manager"]))) as host:
            for _ in range(2):  # two steps of three groups, of which two are played at once
                episodes = [f"{name}/{place}" for name in names for place in range(2)]
                for each in episodes:
                    host.start(each, played, 1)
                waiting, ended = {*episodes}, 0
                while waiting:
                    for name, event in host.wait(30.0):
                        if isinstance(event, EnvStart):
                            host.step(name, "a" if name.endswith("0") else "b")
                        elif isinstance(event, EnvStep):
                            won.append((episodes.index(name), event.reward))
                            host.finish(name)
                        else:
                            waiting.discard(name)
                            ended += 1
                assert ended == len(episodes)
        found.append(sorted(won))
    assert found[0] == found[1]


def test_an_error_of_the_class_fails_the_episodes_of_its_group_with_its_line(host: GroupHost, tmp_path: Path) -> None:
    text = MANAGERS.replace("letters = [text.strip()", "letters = text_actions[7]\n        letters = [text.strip()")
    played = spec(tmp_path, text)
    for name in ("p/0", "p/1"):
        host.start(name, played, 1)
    some(host, 2)
    host.step("p/0", "a")
    host.step("p/1", "b")
    for event in some(host, 2).values():
        assert isinstance(event, EnvFailed)
        assert "IndexError: list index out of range" in event.detail and "plays/worlds/managers.py:44)" in event.detail


def test_fewer_episodes_than_a_group_has_are_a_group(host: GroupHost, tmp_path: Path) -> None:
    host.start("p/0", spec(tmp_path), 1)
    assert isinstance(some(host, 1)["p/0"], EnvStart)
