"""GEM's environments: the adapter with an environment of the same form, and the package's own where it is installed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from posttrain.envs.gem import Draws, Gem
from posttrain.errors import ConfigError, MissingDependency
from posttrain.interfaces.env import EnvSpec
from posttrain.registry import ENVS, is_installed

SPEC = EnvSpec(name="gem")
EASY = "game:GuessTheNumber-v0-easy"
needs_gem = pytest.mark.skipif(not is_installed("gem"), reason="gem-llm is not installed")


class Counting:
    """Draws from the global generator in every step, as GEM's games do. Three steps of a third each solve it."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        self.steps = 0
        return f"first {random.random()}", {"prefix": "Look: ", "suffix": "Move."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        right = action == "go"
        return f"then {random.random()}", 1 / 3 if right else -0.1, not right or self.steps == 3, action == "slow", {}


def played(env: Gem, *actions: str) -> list[str]:
    """The observations of an episode."""
    steps = [env.step(action) for action in actions]
    return [str(message["content"]) for step in steps for message in step.messages]


def test_observations_rewards_and_the_end() -> None:
    env = Gem(Counting(), Draws(), 1.0)
    [first] = env.reset(3).messages
    expected = random.Random(3)
    assert first["content"] == f"Look: first {expected.random()}\nMove."
    steps = [env.step("go") for _ in range(3)]
    assert steps[0].messages[0]["content"] == f"then {expected.random()}"
    assert [step.done for step in steps] == [False, False, True]
    # 1/3 + 1/3 + 1/3 = 1: solved, by rewards of steps alone
    assert (steps[-1].stop, list(steps[-1].messages), env.close()) == ("solved", [], {"success": 1.0})


def test_a_saved_episode_draws_as_it_would_have() -> None:
    env = Gem(Counting(), Draws(), 1.0)
    env.reset(3)
    played(env, "go")
    state = env.state()
    rest = played(env, "go"), [step.stop for step in [env.step("go")]], env.close()
    random.seed(8)
    again = Gem(Counting(), Draws(), 1.0)
    again.restore(state)
    assert (played(again, "go"), [again.step("go").stop], again.close()) == rest


@pytest.mark.parametrize(("action", "stop"), [("stop", "lost"), ("slow", "truncated")])
def test_an_end_without_success(action: str, stop: str) -> None:
    env = Gem(Counting(), Draws(), 1.0)
    env.reset(3)
    last = env.step(action)
    assert (last.reward, last.done, last.stop, env.close()) == (-0.1, True, stop, {"success": 0.0})


def test_episodes_side_by_side_draw_as_if_they_were_alone() -> None:
    alone = Gem(Counting(), Draws(), 1.0)
    alone.reset(5)
    expected = played(alone, "go", "go")
    random.seed(0)
    outside = random.getstate()
    one, other = Gem(Counting(), Draws(), 1.0), Gem(Counting(), Draws(), 1.0)
    one.reset(5)
    other.reset(6)
    found = played(one, "go")
    played(other, "go")
    assert found + played(one, "go") == expected
    assert random.getstate() == outside


@pytest.mark.skipif(is_installed("gem"), reason="gem-llm is installed")
def test_without_the_package_the_error_says_how_to_get_it() -> None:
    with pytest.raises(MissingDependency, match=r"pip install --no-deps gem-llm"):
        ENVS.get("gem")(SPEC, id=EASY)


@needs_gem
def test_its_game_is_won_by_halving() -> None:
    env = ENVS.get("gem")(SPEC, id=EASY)
    [first] = env.reset(3).messages
    assert "between 1 and 10 (inclusive) within 4 turns" in first["content"]
    assert first["content"].endswith("\nEnter your next guess.")
    low, high, done = 1, 10, False
    while not done:  # 10 numbers in 4 guesses: 10 -> 5 -> 2 -> 1
        guess = (low + high) // 2
        step = env.step(f"\\boxed{{{guess}}}")
        done = step.done
        if not done:
            low, high = (guess + 1, high) if "is higher than" in step.messages[0]["content"] else (low, guess - 1)
    assert (step.reward, step.stop, env.close()) == (1.0, "solved", {"success": 1.0})


@needs_gem
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "game:GuessTheNumber-v0-esy"}, "did you mean game:GuessTheNumber-v0-easy"),
        ({"id": "game:Sudoku-v0-easy", "options": {"scale": "four"}}, "gem cannot make game:Sudoku-v0-easy"),
        ({"id": "code:CodeContest"}, "executes model-written code without a sandbox"),
        ({"id": "rg:countdown"}, "passes text to Python's eval"),
    ],
)
def test_what_cannot_be_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ENVS.get("gem")(SPEC, **settings)
