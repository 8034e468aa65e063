"""A group of episodes by a fork's environment manager: its rewards, penalties and errors, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.managed_fork import MANAGERS, managed_fork

from posttrain.envs.env_manager import env_manager, managers
from posttrain.envs.env_manager.group import state_key
from posttrain.envs.env_manager.local_ray import as_ray
from posttrain.errors import ConfigError
from posttrain.interfaces.env import Env, EnvSpec


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    """Imports of a fork stay in the process that plays it."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in {*sys.modules} - {*modules}:
        del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:] = path
    managers._made.clear()


def made(folder: Path, *, text: str = MANAGERS, name: str = "Letters", row: Any = None, **more: Any) -> Env:
    managed_fork(folder, managers=text)
    config = {"env": {"env_name": name, "letters": "abcd", "seed": 7, "max_steps": 3}, "data": {"train_batch_size": 64}}
    settings = {"copies": 3, "function": "make_worlds", "config": config, "invalid_action_penalty": 0.5, **more}
    spec = EnvSpec(name="env_manager", max_turns=3, row={} if row is None else {"env_kwargs": row})
    return env_manager(spec, file=str(folder / "plays/worlds/managers.py"), folder=str(folder), **settings)


def begun(env: Env) -> list[Any]:
    return env.reset(1).messages[0]["answers"]  # type: ignore[union-attr]


def acted(env: Env, *actions: str | None) -> list[Any]:
    return env.step(json.dumps(actions)).messages[0]["answers"]  # type: ignore[union-attr]


def letter(seed: int) -> str:
    """The letter that a start of this seed hides first."""
    return "abcd"[np.random.RandomState(seed).randint(4)]


def test_a_groups_episodes_begin_alike_and_go_their_own_ways(tmp_path: Path) -> None:
    env, right = made(tmp_path), letter(7)
    wrong = "abcd".replace(right, "")[0]
    starts = begun(env)
    assert [each["messages"][0]["content"] for each in starts] == ["Find it: hidden among abcd"] * 3
    assert [each["state_key"] for each in starts] == ["hidden among abcd"] * 3
    first = acted(env, right, wrong, "?")
    assert [each["reward"] for each in first] == [1, 0, 0]
    assert [each["done"] for each in first] == [True, False, False]
    assert [each["penalty"] for each in first] == [0, 0, 0.5]
    assert [each["conversation"] for each in first] == [None, *[[{"role": "user", "content": "asked 1"}]] * 2]
    assert first[0]["metrics"] == {"invalid_actions": 0, "success_rate": 1, "length": 1}
    assert first[2]["metrics"] == {"invalid_actions": 1}
    second = acted(env, None, right, wrong)
    assert second[0]["metrics"] == {} and second[1]["metrics"]["length"] == 2
    last = acted(env, None, None, wrong)
    # the third turn is the last one
    assert last[2]["metrics"] == {"invalid_actions": 0, "success_rate": 0, "length": 3} and not last[2]["done"]


def test_a_place_goes_on_with_its_own_random_numbers_and_another_seed_has_others(tmp_path: Path) -> None:
    random = np.random.RandomState(8)  # seed 7, place 1
    hidden = ["abcd"[random.randint(4)] for _ in range(6)]
    for right in hidden:
        env = made(tmp_path, seat=1)
        begun(env)
        assert [each["done"] for each in acted(env, right, "?", right)] == [True, False, True]


def test_validation_has_starts_of_its_own(tmp_path: Path) -> None:
    env = made(tmp_path, validates=True)
    begun(env)
    # the second manager: seed 7 + 1000, a start for every copy
    hidden = [letter(1007 + place) for place in range(3)]
    assert [each["reward"] for each in acted(env, *hidden)] == [1, 1, 1]


def test_the_row_reaches_every_copy(tmp_path: Path) -> None:
    assert (
        begun(made(tmp_path, row={"hint": "Hear! "}))[2]["messages"][0]["content"] == "Hear! Find it: hidden among abcd"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import numpy as np", "import no_such_package.games", "needs the package no_such_package, which is not installed"),
        ("return LetterManager(worlds, config), Letter", "return Letter", "returned a LetterManager instead of two managers"),
        ('"image": None, "anchor": list(seen)}, list(infos)', '"image": None}', r"managers.py:38\) returned a dict instead of 2"),
        ("np.array(rewards), np", "np.array(rewards[:2]), np", r"step .*managers.py:\d+\) returned 2 rewards for 3 actions"),
        ('{"text": list(seen), "image"', '{"text": seen[:1], "image"', "returned 1 observations under text for 3 copies"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_named_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in MANAGERS
    with pytest.raises(ConfigError, match=said):
        env = made(tmp_path, text=MANAGERS.replace(old, new))
        begun(env)
        acted(env, "a", "b", "c")


def test_a_function_that_ends_the_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"managers.py:\d+: make_worlds of .*managers.py, for env.env_name=Chess, ends the program \(exit code 3\)",
    ):
        made(tmp_path, name="Chess")


def test_states_that_are_equal_have_equal_keys() -> None:
    assert state_key(np.arange(4)) == state_key([0, 1, 2, 3]) or state_key(np.arange(4)) == state_key(np.arange(4))
    assert state_key(np.arange(4)) != state_key(np.arange(4)[::-1])
    assert state_key({"b": 1, "a": [2.0]}) == state_key({"a": [2.0], "b": 1}) != state_key({"a": [2.0], "b": 2})
    assert state_key("text") == "text"


def test_actors_are_made_late_and_keep_their_random_numbers_apart() -> None:
    ray = as_ray()
    made_ones = []

    class Die:
        def __init__(self, sides: list[int]) -> None:
            made_ones.append(self)
            self.sides = sides

        def roll(self) -> int:
            return int(np.random.randint(self.sides[0]))

        def fail(self) -> None:
            raise ValueError("no such side")

    sides = [1000]
    first = ray.remote(num_cpus=0.1)(Die).remote(sides)
    sides[0] = 1  # the actor has a copy
    assert not made_ones
    np.random.seed(0)
    expected = np.random.RandomState(0).randint(1000, size=2).tolist()
    rolled = ray.get([first.roll.remote() for _ in range(20)])
    assert len(made_ones) == 1 and len(set(rolled)) > 1
    assert np.random.randint(1000, size=2).tolist() == expected  # those of the process are as before
    broken = first.fail.remote()
    with pytest.raises(ValueError, match="no such side"):
        ray.get(broken)
