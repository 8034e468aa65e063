"""A game of two players, with the policy on one side or on both: take stones, and take the last one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from posttrain.envs.served_player import PlayerFailed, ServedPlayer, served_player
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, Message
from posttrain.registry import ENVS

Opponent = Literal["policy", "random", "best", "served"]
NUMBER = re.compile(r"\d+")
PLAYER, OTHER = 0, 1  # conversations, by number


@ENVS.register("nim", asks=True)
def nim(
    spec: EnvSpec,
    *,
    stones: int | Sequence[int] = 12,
    most: int = 3,
    opponent: Opponent = "policy",
    served: Mapping[str, Any] | None = None,
    begins: Literal["player", "opponent", "either"] = "either",
    system: str | None = None,
    instruction: str | None = None,
) -> AskingEnv:
    """Two players take 1 to ``most`` of ``stones`` in turn, and who takes the last one wins: reward 1 for the player, else 0.
    A turn that is no such number loses; before the player's first turn it takes one stone.

    Args: stones, at the beginning; of several numbers the seed draws one; opponent, policy (self-play: the present policy takes
        the other side, too, in a conversation that is not trained), random, best, which takes what leaves a multiple of
        ``most`` + 1, or served, the model at an OpenAI-compatible address; served, its url, and model, token_env, timeout_s,
        max_tokens and temperature; begins, who takes first; system, a system message of both; instruction, the rules before
        the first observation, in place of the game's own ("": none).
    Raises: ConfigError.
    """
    beginnings = (stones,) if isinstance(stones, int) else tuple(stones)
    if not beginnings:
        raise ConfigError(Problem("stones is an empty list", fix="write a number, or several", field="stones"))
    if not 1 <= most <= min(beginnings):
        what = f"most is {most} of {min(beginnings)} stones"
        raise ConfigError(Problem(what, fix="use 1 <= most <= stones", field="most"))
    if begins != "player" and most >= min(beginnings):
        what = f"an opponent that begins may take all of {min(beginnings)} stones, and the player has no turn"
        raise ConfigError(Problem(what, fix=f"use {most + 1} stones or more, or begins: player", field="stones"))
    if opponent not in (players := get_args(Opponent)):
        raise ConfigError(
            Problem(f"there is no opponent {opponent!r}", fix=f"use {', '.join(players)}", field="opponent")
        )
    if served is not None and opponent != "served":
        what = f"served has no effect with the opponent {opponent}"
        raise ConfigError(Problem(what, fix="use opponent: served, or leave it out", field="served"))
    if begins not in (known := ("player", "opponent", "either")):
        raise ConfigError(Problem(f"begins is {begins!r}", fix=f"use {', '.join(known)}", field="begins"))
    rules = f"We take 1 to {most} stones in turn. Who takes the last one wins. Answer with a number."
    wording = (system, rules if instruction is None else instruction)
    return Nim(
        beginnings, most, opponent, begins, wording, served_player(served, "served") if opponent == "served" else None
    )


class Nim:
    """One episode, as an AskingEnv: the player's turns are conversation 0, those of a policy on the other side conversation 1."""

    def __init__(
        self,
        stones: Sequence[int],
        most: int,
        opponent: str,
        begins: str,
        wording: tuple[str | None, str],
        served: ServedPlayer | None,
    ):
        self._beginnings, self._left, self._most = stones, stones[0], most
        self._opponent = opponent
        self._begins = begins
        self._system, self._instruction = wording
        self._served = served
        self._read: list[Message] = []  # by the served opponent, with its turns
        self._begun: set[int] = set()  # conversations
        self._turns = {PLAYER: 0, OTHER: 0}
        self._won: bool | None = None
        self._legal = True  # of the player's last turn
        self._emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None] = lambda event: None

    def begin(self, seed: int, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        self._emit = emit
        self._random = random.Random(f"nim/{seed}")
        self._seed = seed
        if len(self._beginnings) > 1:
            self._left = self._random.choice(self._beginnings)
        other = self._random.random() < 0.5 if self._begins == "either" else self._begins == "opponent"
        self._next(OTHER if other else PLAYER, taken=None)

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        self._take(int(turn.partition("/")[0]), _number(action))

    def state(self) -> Any:
        """Return the state of the game while it waits for a turn of the policy."""
        return {
            "seed": self._seed,
            "random": self._random.getstate(),
            "left": self._left,
            "turns": [self._turns[PLAYER], self._turns[OTHER]],
            "begun": sorted(self._begun),
            "read": list(self._read),
            "legal": self._legal,
        }

    def restore(self, state: Any, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        """Continue a saved game, which waits for the turn that it asked for."""
        self._emit = emit
        self._seed, self._left, self._legal = state["seed"], state["left"], state["legal"]
        version, numbers, gauss = state["random"]
        self._random = random.Random()
        self._random.setstate((version, tuple(numbers), gauss))
        self._turns = dict(zip((PLAYER, OTHER), state["turns"], strict=True))
        self._begun, self._read = set(state["begun"]), list(state["read"])

    def close(self) -> Mapping[str, float]:
        """Return success, the player's number of turns, and whether its last turn was legal."""
        return {
            "success": float(self._won is True),
            "num_actions": float(self._turns[PLAYER]),
            "action_is_valid": float(self._legal),
        }

    def _take(self, who: int, number: int) -> None:
        legal = 1 <= number <= min(self._most, self._left)
        if not legal and self._turns[PLAYER] == 0:  # an episode without a turn of the player's has nothing to train
            number, legal = 1, True
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
        if who == OTHER and self._served:
            self._read += self._messages(OTHER, taken)
            try:
                said = self._served.turn(self._read, (self._seed * 1000 + self._turns[OTHER]) % 2**31)
            except PlayerFailed as failure:
                self._emit(failure)
                return
            self._read.append({"role": "assistant", "content": said})
            self._take(OTHER, _number(said))
            return
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
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": "\n".join(text for text in (self._instruction, seen) if text)}]

    def _scripted(self) -> int:
        """Take at random; the best takes what leaves a multiple of most + 1, where there is such a number."""
        best = self._left % (self._most + 1)
        if self._opponent == "best" and best:
            return best
        return self._random.randint(1, min(self._most, self._left))


def _number(action: str) -> int:
    """Return the first number of a turn; 0 for none, and for one of more digits than any number of stones has."""
    found = NUMBER.search(action)
    return int(found[0]) if found and len(found[0]) < 10 else 0
