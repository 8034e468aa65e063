"""Checks of what an environment of skyrl-gym's form hands over: each problem names its class, file and line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Message
from posttrain.user_files import defined_at, failed_at

STEP = "step returns a mapping (BaseTextEnvStepOutput) of observations, a list of messages, reward, a number, and done, a bool"
INIT = "init returns (messages, metadata)"
MESSAGE = "a message is a mapping with the texts role and content"


def not_made(name: str, made: Any, error: TypeError) -> ConfigError:
    """The error for an environment that ``skyrl_gym.make`` could not make.

    Args: made, its class; error, what ``make`` raised, whose text about a constructor that failed hides where it did.
    """
    cause = error.__context__ if isinstance(error.__context__, TypeError) else error
    what = f"{name} ({failed_at(cause, made)}) cannot be made with env_config and extras, as SkyRL makes it: {cause}"
    return ConfigError(Problem(what, fix="inherit from skyrl_gym.envs.base_text_env.BaseTextEnv, and take both"))


def start_of(env: Any, given: Any) -> list[Message]:
    """The messages that ``init`` has returned: the list itself, which its environment may change. Raises: ConfigError."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise _wrong(env, "init", f"returned {_shown(given)}", INIT)
    messages = given[0]
    if fault := _fault_of(messages):
        raise _wrong(env, "init", f"returned messages of which {fault}", f"{INIT}; {MESSAGE}")
    return messages if isinstance(messages, list) else list(messages)


def step_of(env: Any, answer: Any) -> tuple[list[Message], float | None, bool]:
    """Observations, reward and whether the episode is over, from what ``step`` has returned. Raises: ConfigError."""
    if not isinstance(answer, Mapping):
        raise _wrong(env, "step", f"returned {_shown(answer)}", STEP)
    if lacking := [name for name in ("reward", "done") if name not in answer]:
        raise _wrong(env, "step", f"returned a mapping without {' and '.join(lacking)}", STEP)
    observations, reward, done = answer.get("observations"), answer["reward"], answer["done"]
    observations = [] if observations is None else observations
    if fault := _fault_of(observations):
        raise _wrong(env, "step", f"returned observations of which {fault}", f"{STEP}; {MESSAGE}")
    if done is None or isinstance(done, str | bytes | Sequence | Mapping):
        raise _wrong(env, "step", f"returned done={_shown(done)}", STEP)
    return list(observations), _number(env, reward), bool(done)


def _number(env: Any, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        found = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise _wrong(env, "step", f"returned reward={_shown(reward)}", "a reward is a finite number, or None")
    return found


def _fault_of(messages: Any) -> str:
    """Return the reason for which something is no list of messages; "" for one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return f"the list is {_shown(messages)}"
    for place, each in enumerate(messages):
        if not isinstance(each, Mapping) or not {"role", "content"} <= each.keys():
            return f"number {place} is {_shown(each)}"
    return ""


def _wrong(env: Any, method: str, what: str, expected: str) -> ConfigError:
    made = type(env)
    function = getattr(made, method, made)
    text = f"{made.__name__}.{method} ({defined_at(function)}) {what}; {expected}"
    return ConfigError(Problem(text))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"
