"""A game of two players, with the policy on one side or on both: take stones, and take the last one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Literal

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, Message
from posttrain.registry import ENVS

Opponent = Literal["policy", "random", "best"]
NUMBER = re.compile(r"\d+")
PLAYER, OTHER = 0, 1  # conversations, by number


@ENVS.register("nim", asks=True)
def nim(
    spec: EnvSpec,
    *,
    stones: int = 12,
    most: int = 3,
    opponent: Opponent = "policy",
    begins: Literal["player", "opponent", "either"] = "either",
    system: str | None = None,
) -> AskingEnv:
    """Two players take 1 to ``most`` of ``stones`` in turn, and who takes the last one wins: reward 1 for the player, else 0.
    A turn that is no such number loses.

    Args: opponent, policy (self-play: the present policy takes the other side, too, in a conversation that is not trained),
        random, or best, which takes what leaves a multiple of ``most`` + 1; begins, who takes first; system, a system message
        of both.
    Raises: ConfigError.
    """
    if not 1 <= most <= stones:
        raise ConfigError(Problem(f"most is {most} of {stones} stones", fix="use 1 <= most <= stones", field="most"))
    if opponent not in (known := ("policy", "random", "best")):
        raise ConfigError(
            Problem(f"there is no opponent {opponent!r}", fix=f"use {', '.join(known)}", field="opponent")
        )
    if begins not in (known := ("player", "opponent", "either")):
        raise ConfigError(Problem(f"begins is {begins!r}", fix=f"use {', '.join(known)}", field="begins"))
    return Nim(stones, most, opponent, begins, system)


class Nim:
    """One episode, as an AskingEnv: the player's turns are conversation 0, those of a policy on the other side conversation 1."""

    def __init__(self, stones: int, most: int, opponent: str, begins: str, system: str | None):
        self._left, self._most = stones, most
        self._opponent = opponent
        self._begins = begins
        self._system = system
        self._begun: set[int] = set()  # conversations
        self._turns = {PLAYER: 0, OTHER: 0}
        self._won: bool | None = None
        self._legal = True  # of the player's last turn
        self._emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None] = lambda event: None

    def begin(self, seed: int, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        self._emit = emit
        self._random = random.Random(f"nim/{seed}")
        other = self._random.random() < 0.5 if self._begins == "either" else self._begins == "opponent"
        self._next(OTHER if other else PLAYER, taken=None)

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        who = int(turn.partition("/")[0])
        found = NUMBER.search(action)
        # So many digits are no number of stones
        number = int(found[0]) if found and len(found[0]) < 10 else 0
        self._take(who, number)

    def close(self) -> Mapping[str, float]:
        """Return success, the player's number of turns, and whether its last turn was legal."""
        return {
            "success": float(self._won is True),
            "num_actions": float(self._turns[PLAYER]),
            "action_is_valid": float(self._legal),
        }

    def _take(self, who: int, number: int) -> None:
        legal = 1 <= number <= min(self._most, self._left)
        self._left -= number if legal else 0
        if who == PLAYER:
            self._legal = legal
        if not legal or self._left == 0:
            self._won = (who == PLAYER) == legal
            stop = ("solved" if self._won else "lost") if legal else "illegal" if who == PLAYER else "opponent_illegal"
            self._emit(EnvStep(done=True, stop=stop, reward=float(self._won)))
            return
        self._next(OTHER if who == PLAYER else PLAYER, taken=number)

    def _next(self, who: int, *, taken: int | None) -> None:
        self._turns[who] += 1
        if who == OTHER and self._opponent != "policy":
            self._take(OTHER, self._scripted())
            return
        name = f"{who}/{self._turns[who]}"
        self._emit(EnvAsk(turn=name, line=who, messages=self._messages(who, taken), trained=who == PLAYER))

    def _messages(self, who: int, taken: int | None) -> list[Message]:
        seen = f"{self._left} left." if taken is None else f"I take {taken}. {self._left} left."
        if who in self._begun:
            return [{"role": "user", "content": seen}]
        self._begun.add(who)
        rules = f"We take 1 to {self._most} stones in turn. Who takes the last one wins. Answer with a number.\n"
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": rules + seen}]

    def _scripted(self) -> int:
        """Take at random; the best takes what leaves a multiple of most + 1, where there is such a number."""
        best = self._left % (self._most + 1)
        if self._opponent == "best" and best:
            return best
        return self._random.randint(1, min(self._most, self._left))
