"""The environments of the package gem-llm (GEM), unchanged. The sole importer of gem."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy

from posttrain.errors import ConfigError, MissingDependency, Problem, did_you_mean
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep
from posttrain.libraries import reasoning_gym
from posttrain.registry import ENVS

# gem-llm 0.1.0 asks for versions that exclude ours (antlr4 4.13 beside omegaconf, an older reasoning-gym) and works with ours.
INSTALL = "pip install --no-deps gem-llm==0.1.0, beside 'posttrain[tasks]'; the games of words also need nltk"
RUN_CODE = ("code:", "terminal:")  # environments that execute model-written code without a sandbox


@ENVS.register("gem")
def gem(
    spec: EnvSpec,
    *,
    id: str,
    options: Mapping[str, Any] | None = None,
    reward_for_success: float = 1.0,
    allow_unboxed_code: bool = False,
) -> Env:
    """The GEM environment with this ``id``, such as game:GuessTheNumber-v0-easy, with its own rewards.

    An observation stands between the ``prefix`` and the ``suffix`` of its info, as GEM's own wrapper writes it.

    Args: options, keyword arguments for gem.make; an episode whose rewards sum to at least reward_for_success counts as a
        success; allow_unboxed_code permits environments that execute model-written code.
    Raises: ConfigError when the environment does not exist or cannot be made; MissingDependency.
    """
    known = _ids()
    if id not in known:
        fix = did_you_mean(id, known) or "gem.print_envs() lists the ids"
        raise ConfigError(Problem(f"gem has no environment {id!r}", fix=fix, field="id"))
    if id.startswith(RUN_CODE) and not allow_unboxed_code:
        what = f"the environment {id} executes model-written code without a sandbox"
        fix = "use the reward code, which sandboxes it, or accept it with environment.settings.allow_unboxed_code=true"
        raise ConfigError(Problem(what, fix=fix, field="id"))
    if id.startswith("rg:"):
        reasoning_gym.check_scorable(id.removeprefix("rg:"))
    draws = Draws()
    try:
        with draws.ours():
            made = import_module("gem").make(id, **(options or {}))
    except (ImportError, LookupError, TypeError, ValueError, OSError) as error:
        fix = "check options, and what the environment needs"
        raise ConfigError(Problem(f"gem cannot make {id}: {error}", fix=fix, field="id")) from None
    return Gem(made, draws, reward_for_success)


class Gem:
    """Adapter from an environment of GEM to Env."""

    def __init__(self, env: Any, draws: Draws, enough: float):
        self._env = env
        self._draws = draws
        self._enough = enough
        self._sum = 0.0
        self._seed = 0
        self._actions: list[str] = []

    def state(self) -> Any:
        """Return the seed and the actions so far: with draws of its own an episode is equal for equal ones."""
        return {"seed": self._seed, "actions": list(self._actions)}

    def restore(self, state: Any) -> None:
        self.reset(state["seed"])
        for action in state["actions"]:
            self.step(action)

    def reset(self, seed: int) -> EnvStart:
        self._seed = seed
        with self._draws.ours():
            observation, info = self._env.reset(seed=seed % 2**32)
        return EnvStart(messages=[_message(observation, info)])

    def step(self, action: str) -> EnvStep:
        self._actions.append(action)
        with self._draws.ours():
            observation, reward, terminated, truncated, info = self._env.step(action)
        done = bool(terminated or truncated)
        self._sum += float(reward)
        return EnvStep(
            messages=[] if done else [_message(observation, info)],
            reward=float(reward),
            done=done,
            stop="" if not done else "solved" if self._solved else "truncated" if truncated else "lost",
        )

    def close(self) -> Mapping[str, float]:
        return {"success": float(self._solved)}

    @property
    def _solved(self) -> bool:
        return self._sum >= self._enough - 1e-6  # thirds and sixths of a reward sum to a little less


class Draws:
    """State of the global random generators, kept apart from that of other environments in the process.

    GEM's environments draw from ``random`` and numpy's global generator, also in ``step``.
    """

    def __init__(self) -> None:
        self._states = _states()

    @contextmanager
    def ours(self) -> Iterator[None]:
        before = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(before)


def _states() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _message(observation: Any, info: Mapping[str, Any]) -> dict[str, str]:
    text, suffix = f"{info.get('prefix', '')}{observation}", info.get("suffix", "")
    between = "\n" if suffix and text and not text.endswith("\n") else ""
    return {"role": "user", "content": f"{text}{between}{suffix}"}


def _ids() -> list[str]:
    """Return the ids that GEM registers. Raises: MissingDependency."""
    if find_spec("gem") is None:
        what = "gem is not installed (needed by the environment gem)"
        raise MissingDependency(Problem(what, fix=INSTALL, library="gem"))
    reasoning_gym.check_installed("the environment gem")
    reasoning_gym.preload()  # GEM imports it
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    names = sorted(import_module("gem.envs.registration").ENV_REGISTRY)
    root.handlers[:] = handlers  # importing gem 0.1.0 configures the logging of the whole process
    root.setLevel(level)
    return names
