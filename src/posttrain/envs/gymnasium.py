"""Gymnasium environments with named actions, played in text. The sole importer of gymnasium."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import gymnasium as library

from posttrain.config.environment import TextGameWording
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS

_HIGHLIGHT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")  # marks the player by colour; replaced by brackets


@ENVS.register("gymnasium")
def gymnasium(
    spec: EnvSpec,
    *,
    id: str,
    actions: Sequence[str],
    options: Mapping[str, Any] | None = None,
    reward_for_success: float = 1.0,
    **wording: Unpack[TextGameWording],
) -> Env:
    """The gymnasium environment with this ``id``, with its own rewards.

    The observation is its ansi rendering, where it has one, else its observation as text. An answer without an action does not
    step it.

    Args: actions, a name for every action of its discrete space, in the order of their numbers; options, keyword arguments for
        gymnasium.make; an episode that terminates with a last reward of at least reward_for_success counts as a success;
        wording is TextGame's.
    Raises: ConfigError when the environment does not exist, or its actions differ from these.
    """
    return TextGame(spec, Gymnasium(id, list(actions), dict(options or {}), reward_for_success), **wording)


class Gymnasium:
    def __init__(self, id: str, actions: list[str], options: dict[str, Any], reward_for_success: float):
        try:
            known = library.spec(id)
            renders = "ansi" in library.make(known).metadata.get("render_modes", ())
            self._env = library.make(known, **{"render_mode": "ansi"} | options if renders else options)
        except (library.error.Error, TypeError, AttributeError) as error:
            raise ConfigError(
                Problem(f"gymnasium cannot make {id}: {error}", fix="check id and options", field="id")
            ) from None
        count = getattr(self._env.action_space, "n", None)
        if count != len(actions):
            what = f"{id} has the actions {self._env.action_space}, but {len(actions)} names are given for them"
            raise ConfigError(Problem(what, fix="give a name for each action of a discrete space", field="actions"))
        self.actions = actions
        self.instruction = (
            f"Each turn choose one of {', '.join(actions)} and answer <answer>{actions[0]}</answer>, with your choice."
        )
        self._renders = renders
        self._enough = reward_for_success
        self._seen = self._observed = ""

    def begin(self, seed: int) -> str:
        self._look(self._env.reset(seed=seed % 2**32)[0])
        return self._seen

    def act(self, action: str | None) -> Played:
        if action is None:
            return Played(seen=self._seen, reward=0.0, effective=False)
        before = self._observed
        observation, reward, terminated, truncated, _ = self._env.step(self.actions.index(action))
        self._look(observation)
        return Played(
            seen=self._seen,
            reward=float(reward),
            done=terminated or truncated,
            success=bool(terminated and float(reward) >= self._enough),
            effective=self._observed != before,
        )

    def state(self) -> str:
        return self._observed

    def _look(self, observation: Any) -> None:
        self._observed = str(observation)
        self._seen = _HIGHLIGHT.sub(r"[\1]", str(self._env.render())) if self._renders else self._observed
