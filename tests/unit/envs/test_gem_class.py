"""Classes of one's own with GEM's interface: texts around observations, rewards, ends, draws of their own, and saved episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.envs.gem_class import gem_class
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec
from posttrain.plan.environments.gem_class import gem_class as problems_of

GAME = """
import random

from game.words import PREFIX


class Guess:
    env_instruction = "Guess."

    def __init__(self, high=9):
        self.high = high

    def reset(self, seed=None):
        random.seed(seed)
        self.number = random.randint(1, self.high)
        return "begin", {"prefix": PREFIX, "suffix": "!"}

    def step(self, answer):
        right = answer == str(self.number)
        return f"heard {answer}", float(right), right, False, {"metrics": {"success": right}}
"""


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    (tmp_path / "game").mkdir()
    (tmp_path / "game" / "__init__.py").write_text("")
    (tmp_path / "game" / "words.py").write_text("PREFIX = '> '\n")
    (tmp_path / "game" / "guess.py").write_text(GAME)
    return tmp_path


def test_it_is_played_with_texts_around_its_observations(fork: Path) -> None:
    env = gem_class(
        EnvSpec(name="gem_class", row={}, max_turns=5),
        path="game.guess:Guess",
        root=str(fork),
        options={"high": 1},
        template="Turn {turn_idx}: {observation}",
        system="S",
    )
    start = env.reset(7)
    assert [message["content"] for message in start.messages] == ["S", "Guess.\nTurn 1: > begin!"]
    missed = env.step(" 2 ")
    assert (missed.reward, missed.done, missed.messages[0]["content"]) == (0.0, False, "Turn 2: heard 2")
    won = env.step("1")
    assert (won.reward, won.done, won.stop) == (1.0, True, "solved")
    assert env.close()["success"] == 1.0


def test_equal_seeds_are_equal_games_and_saved_ones_continue(fork: Path) -> None:
    def made():
        return gem_class(EnvSpec(name="gem_class", row={}, max_turns=20), path="game.guess:Guess", root=str(fork))

    first, second = made(), made()
    first.reset(3)
    first.step("no")
    second.reset(8)
    second.restore(first.state())
    answers = [str(number) for number in range(1, 10)]
    assert [first.step(each).reward for each in answers] == [second.step(each).reward for each in answers]


def test_a_class_that_cannot_be_made_says_why(fork: Path) -> None:
    with pytest.raises(ConfigError, match=r"game\.guess:Guess cannot be made: TypeError"):
        gem_class(
            EnvSpec(name="gem_class", row={}, max_turns=5), path="game.guess:Guess", root=str(fork), options={"hgih": 1}
        )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("game.guess:Guess", ""),
        ("game:Guess", ""),
        ("game.gues:Guess", "there is no module game.gues in "),
        ("missing.py:Guess", "there is no module missing.py"),
        ("game.guess", "'game.guess' names no class"),
    ],
)
def test_plan_looks_for_the_module_without_importing_it(fork: Path, path: str, said: str) -> None:
    found = list(problems_of({"path": path, "root": str(fork)}, "environment.settings"))
    assert [problem.what.startswith(said) for problem in found] == [True] * bool(said)
