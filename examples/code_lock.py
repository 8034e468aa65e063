"""A lock of four digits from 0 to 3, and eight tries: after each the player sees the digits that are right.

A game of several turns that is won by strategy alone. The answers must be read (keep what is shown, try another digit where
there is an underscore): a player who does not read them opens at most 8 of the 256 locks, whatever is tried, and one who does
opens all.

    environment: {name: examples/code_lock.py:build, max_turns: 8}
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.text_game import Played, TextGame
from posttrain.interfaces.env import Env, EnvSpec

DIGITS, PLACES = "0123", 4
CODES = ["".join(digits) for digits in itertools.product(DIGITS, repeat=PLACES)]
random.Random("code_lock").shuffle(CODES)
HELD_OUT = CODES[:64]  # of validation; training never sees them


def build(spec: EnvSpec, **wording: Any) -> Env:
    """An environment of one lock. Args: wording, settings of TextGame."""
    return LockEnv(
        spec, CodeLock(), usual_turns=8, **({"action_pattern": r"^([0-3]{4})$", "instruction": ""} | wording)
    )


class CodeLock:
    """The rules. A turn earns a quarter for every place that is right for the first time, and the last of them 1 more."""

    instruction = "Open the lock: four digits from 0 to 3."
    actions = CODES

    def begin(self, seed: int) -> str:
        codes = CODES[64:] if seed >= FIRST_TRAINING_SEED else HELD_OUT
        self.code = codes[seed % len(codes)]
        self.found = [False] * PLACES
        self.tried: list[set[str]] = [set() for _ in range(PLACES)]
        self.sound = self.guesses = 0  # guesses that no answer so far rules out, from the second on
        return self._shown()

    def act(self, action: str | None) -> Played:
        if action is None:
            return Played(seen=self._shown(), reward=0.0, effective=False)
        if any(self.tried):
            self.guesses += 1
            self.sound += all(self._allowed(place, digit) for place, digit in enumerate(action))
        new = [not self.found[place] and digit == self.code[place] for place, digit in enumerate(action)]
        self.found = [before or now for before, now in zip(self.found, new, strict=True)]
        for tried, digit in zip(self.tried, action, strict=True):
            tried.add(digit)
        solved = action == self.code
        return Played(seen=self._shown(), reward=sum(new) / PLACES + solved, done=solved, success=solved)

    def state(self) -> str:
        return self._shown()

    def _allowed(self, place: int, digit: str) -> bool:
        return digit == self.code[place] if self.found[place] else digit not in self.tried[place]

    def _shown(self) -> str:
        return "".join(digit if found else "_" for digit, found in zip(self.code, self.found, strict=True))


class LockEnv(TextGame):
    """A TextGame that also measures strategy: ``sound_share``, the guesses that agree with all answers so far."""

    def close(self) -> dict[str, float]:
        game = self._game
        assert isinstance(game, CodeLock)
        sound = {"sound_share": game.sound / game.guesses} if game.guesses else {}
        return {**super().close(), **sound}
