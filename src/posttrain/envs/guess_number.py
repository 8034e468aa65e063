"""Guess the number: after every guess the player learns if the secret is higher or lower."""

from __future__ import annotations

import random
from typing import Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS


@ENVS.register("guess_number")
def guess_number(
    spec: EnvSpec, *, low: int = 1, high: int = 10, consistent_reward: float = 0.0, **wording: Unpack[TextGameWording]
) -> Env:
    r"""A secret number from ``low`` to ``high``: reward 1 for the guess that finds it.

    Args: consistent_reward, additional reward for every guess that is consistent with the answers so far; wording is
        TextGame's, with 5 turns and the first number of an answer (``(\d+)``) by default.
    Raises: ConfigError.
    """
    if low >= high:
        raise ConfigError(Problem(f"low is {low} and high is {high}", fix="use a high above low", field="high"))
    usual: TextGameWording = {"action_pattern": r"(\d+)"}
    return TextGame(spec, GuessNumber(low, high, consistent_reward), usual_turns=5, **(usual | wording))


class GuessNumber:
    """The rules of the game. ``low`` and ``high`` are included."""

    def __init__(self, low: int, high: int, consistent_reward: float):
        self.actions = [str(number) for number in range(low, high + 1)]
        self.instruction = f"Guess my number from {low} to {high}. I say whether it is higher or lower."
        self._range = (low, high)
        self._consistent_reward = consistent_reward

    def begin(self, seed: int) -> str:
        low, high = self.possible = self._range  # numbers that are consistent with the answers so far
        self.secret = random.Random(f"guess_number/{seed}").randint(low, high)
        return "Your first guess?"

    def act(self, action: str | None) -> Played:
        low, high = self.possible
        if action is None:
            told = f"Say a number from {self._range[0]} to {self._range[1]}."
            return Played(seen=told, reward=0.0, effective=False)
        guess = int(action)
        reward = self._consistent_reward if low <= guess <= high else 0.0
        if guess == self.secret:
            return Played(seen="Right.", reward=reward + 1.0, done=True, success=True)
        higher = guess < self.secret
        self.possible = (max(low, guess + 1), high) if higher else (low, min(high, guess - 1))
        told = f"It is {'higher' if higher else 'lower'} than {guess}."
        return Played(seen=told, reward=reward, effective=self.possible != (low, high))

    def state(self) -> str:
        return f"{self.possible[0]}-{self.possible[1]}"
