"""Environment classes with GEM's interface, as forks of ROLL register them, played with ROLL's texts around them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.gem import Draws
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.libraries.own_code import load
from posttrain.registry import ENVS

ANY = r"(.*)"  # the class takes its action out of the answer itself


@ENVS.register("gem_class")
def gem_class(
    spec: EnvSpec,
    *,
    path: str,
    root: str | None = None,
    options: Mapping[str, Any] | None = None,
    **wording: Unpack[TextGameWording],
) -> Env:
    """An environment class of your own with GEM's interface: ``reset(seed=…)`` gives an observation and an info, ``step(answer)``
    an observation, a reward, terminated, truncated and an info.

    The text before the first observation is the class's ``env_instruction``; an info's ``prefix`` and ``suffix`` stand around an
    observation, and ``metrics.success`` of the last one says whether the episode was a success (without it, a reward above 0 in
    the last turn does).

    Args: path, package.module:Class or file.py:Class; root, a folder in which the package lies, such as the checkout of a fork;
        options, keyword arguments of the class; wording is TextGame's, whose action_pattern takes the whole answer by default.
    Raises: ConfigError when the class cannot be imported or made.
    """
    if root is not None and (folder := str(Path(root).expanduser().resolve())) not in sys.path:
        sys.path.append(folder)  # last, so that it replaces no library
    draws = Draws()
    kind = load(path)
    try:
        with draws.ours():
            made = kind(**(options or {}))
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        what = f"{path} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, fix="check options", field="options")) from None
    return TextGame(spec, GemGame(made, draws), **({"action_pattern": ANY} | wording))


class GemGame:
    """Adapter from a class with GEM's interface to Game."""

    actions: tuple[str, ...] = ()  # any text

    def __init__(self, env: Any, draws: Draws):
        self._env = env
        self._draws = draws
        self._seen = ""

    @property
    def instruction(self) -> str:
        return str(getattr(self._env, "env_instruction", None) or "")

    def begin(self, seed: int) -> str:
        with self._draws.ours():
            observation, info = self._env.reset(seed=seed % 2**32)
        self._seen = _text(observation, info)
        return self._seen

    def act(self, action: str | None) -> Played:
        with self._draws.ours():
            observation, reward, terminated, truncated, info = self._env.step(action or "")
        self._seen = _text(observation, info)
        done = bool(terminated or truncated)
        metrics = info.get("metrics") or {}
        success = bool(metrics.get("success", float(reward) > 0))
        effective = bool(metrics.get("action_is_effective", True))
        return Played(seen=self._seen, reward=float(reward), done=done, success=done and success, effective=effective)

    def state(self) -> str:
        return self._seen


def _text(observation: Any, info: Mapping[str, Any]) -> str:
    return f"{info.get('prefix', '')}{observation}{info.get('suffix', '')}"
