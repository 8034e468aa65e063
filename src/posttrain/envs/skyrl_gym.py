"""The environments of the package skyrl-gym, and a user's own in the same form, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skyrl_gym.envs
from omegaconf import OmegaConf
from skyrl_gym.envs.registration import load_env_creator, registry
from skyrl_gym.envs.sql.env import SQLEnv

from posttrain.envs.skyrl_answers import not_made, start_of, step_of
from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep, Message
from posttrain.libraries.own_code import load
from posttrain.libraries.skyrl_names import REPLAYED, RUN_CODE
from posttrain.registry import ENVS

# Defaults of SkyRL's own configuration.
USUAL: dict[str, dict[str, Any]] = {
    "search": {"log_requests": False, "search_url": "http://127.0.0.1:8000/retrieve", "topk": 3, "timeout": 30},
    "text2sql": {"db_path": "/home/ray/default/sql_data"},
}


@ENVS.register("skyrl_gym")
def make_skyrl_gym(
    spec: EnvSpec,
    *,
    env_class: str | None = None,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    register: Mapping[str, str] | None = None,
    allow_unboxed_code: bool = False,
) -> Env:
    """The environment named by the row's column ``env_class``, or else by the setting ``env_class``.

    It receives the row without its prompt as ``extras``, with the run's ``max_turns`` if set, and ``configs[env_class]`` over
    SkyRL's defaults as ``env_config``.

    Args: env_class, a registered id, or package.module:Class; register, further ids with their package.module:Class or
        path/to/file.py:Class; allow_unboxed_code permits environments that execute model-written code, and text2sql on a machine
        without sandboxes.
    Raises: ConfigError.
    """
    name = str(spec.row.get("env_class") or env_class or "")
    if not name:
        what = "the row has no env_class, and environment.settings names none"
        raise ConfigError(Problem(what, fix="give one, such as environment.settings.env_class=gsm8k"))
    for own, entry_point in (register or {}).items():
        if own not in registry:
            skyrl_gym.envs.register(id=own, entry_point=_entry_point(entry_point))
    if ":" in name and name not in registry:
        skyrl_gym.envs.register(id=name, entry_point=_entry_point(name))
    if name not in registry:
        known = sorted(registry)
        fix = did_you_mean(name, known, listed=True) or "add it with environment.settings.register"
        raise ConfigError(Problem(f"skyrl-gym has no environment {name!r} (known: {', '.join(known)})", fix=fix))
    if name in RUN_CODE and not allow_unboxed_code:
        what = f"the environment {name} executes model-written code without a sandbox"
        fix = "use the reward code, which sandboxes it, or accept it with environment.settings.allow_unboxed_code=true"
        raise ConfigError(Problem(what, fix=fix))
    extras = {key: value for key, value in spec.row.items() if key != "env_class"}
    if spec.max_turns is not None:
        extras["max_turns"] = spec.max_turns
    config = OmegaConf.create({**USUAL.get(name, {}), **(configs or {}).get(name, {})})
    try:
        env = skyrl_gym.make(name, env_config=config, extras=extras)
    except TypeError as error:
        entry_point = registry[name].entry_point
        made = entry_point if callable(entry_point) else load_env_creator(entry_point)
        raise not_made(name, made, error) from error
    if isinstance(env, SQLEnv):
        from posttrain.envs.skyrl_sql import box_queries

        box_queries(env, allow_unboxed=allow_unboxed_code)
    if callable(getattr(env, "state", None)) and callable(getattr(env, "restore", None)):
        return OwnState(env, spec)
    return Replayed(env, spec) if name in REPLAYED else SkyRLGym(env, spec)


def _entry_point(where: str) -> Any:
    """Return what ``register`` takes for package.module:Class or path/to/file.py:Class. A file in a fork's package skyrl_gym is a
    module of the installed one, so that it finds what stands beside it."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py"):
        return where
    file = Path(path).resolve()
    package = next((folder for folder in file.parents if folder.name == skyrl_gym.__name__), None)
    if package is None:
        return load(where)
    for module in (skyrl_gym, skyrl_gym.envs):
        folder = str(package.parent.joinpath(*module.__name__.split(".")))
        if folder not in module.__path__:
            module.__path__.append(folder)
    return f"{'.'.join(file.relative_to(package.parent).with_suffix('').parts)}:{name}"


class SkyRLGym:
    """Adapter from an environment of skyrl-gym to Env.

    ``init`` returns the list that SkyRL's generator keeps as the conversation; environments of its recursive language models hold
    on to that list and take their last instruction out of it in ``step``. So the list is kept up to date here as there, and when
    a step has changed it, the conversation goes on as the environment left it.
    """

    def __init__(self, env: Any, spec: EnvSpec) -> None:
        self._env = env
        self._history: list[Message] = copy.deepcopy(list(spec.messages))

    def reset(self, seed: int) -> EnvStart:
        self._history = start_of(self._env, self._env.init(self._history))
        return EnvStart(messages=list(self._history))

    def step(self, action: str) -> EnvStep:
        before = copy.deepcopy(self._history)
        answer = self._env.step(action)
        changed = self._history != before
        observations, reward, done = step_of(self._env, answer)
        corrected = answer.get("postprocessed_action")
        self._history.append({"role": "assistant", "content": action if corrected is None else corrected})
        self._history += observations
        return EnvStep(
            messages=observations,
            reward=reward,
            done=done,
            action=corrected,
            conversation=list(self._history) if changed else None,
        )

    def close(self) -> Mapping[str, float]:
        """Return those of its metrics that are numbers, and what its class makes of them for the report of many episodes: means
        in every environment of SkyRL's, so that the run's means over episodes are theirs, under their names."""
        # Classes of before October 2025 have none.
        metrics = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        aggregate = getattr(type(self._env), "aggregate_metrics", None)
        self._env.close()
        return {**_numbers(metrics), **(_numbers(aggregate([metrics])) if aggregate and metrics else {})}


class Replayed(SkyRLGym):
    """One whose episodes depend on the row and the actions alone: saved as its actions, continued by taking them again."""

    def __init__(self, env: Any, spec: EnvSpec) -> None:
        super().__init__(env, spec)
        self._actions: list[str] = []

    def step(self, action: str) -> EnvStep:
        self._actions.append(action)
        return super().step(action)

    def state(self) -> Any:
        return list(self._actions)

    def restore(self, state: Any) -> None:
        self.reset(0)
        for action in state:
            self.step(action)


class OwnState(SkyRLGym):
    """One whose class has ``state()`` and ``restore(state)`` itself, which is called after ``init``."""

    def state(self) -> Any:
        return {"history": list(self._history), "own": self._env.state()}

    def restore(self, state: Any) -> None:
        self.reset(0)
        self._history[:] = state["history"]  # the list that the environment may hold
        self._env.restore(state["own"])


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}
