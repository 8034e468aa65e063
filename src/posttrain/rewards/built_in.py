"""Construction of a built-in reward from its name and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.reward import RewardFn
from posttrain.registry import REWARDS
from posttrain.rewards.options import RunWide

# Parameter of a factory that takes the settings of the whole reward section.
_RUN_WIDE = "run_wide"


def built_in(name: str, options: Mapping[str, Any], run_wide: RunWide | None = None) -> RewardFn:
    """Call the registered factory ``name`` with the options, and with ``run_wide`` when it has that parameter.

    Raises: ConfigError for an unknown name, unknown options, and options of the wrong type; RequestError as the factory
        does.
    """
    if name not in REWARDS.names():
        problem = REWARDS.problem(name)
        fix = "; ".join(filter(None, [problem.fix, "a function of your own needs path, the Python file that holds it"]))
        raise ConfigError(replace(problem, fix=fix))
    factory = REWARDS.get(name)
    if problems := list(_wrong_options(name, factory, options)):
        raise ConfigError(problems)
    more = {_RUN_WIDE: run_wide or RunWide()} if _RUN_WIDE in inspect.signature(factory).parameters else {}
    reward: RewardFn = factory(**options, **more)
    return reward


def _wrong_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[Problem]:
    known = [parameter for parameter in inspect.signature(factory).parameters if parameter != _RUN_WIDE]
    types = get_type_hints(factory)
    for option, value in options.items():
        if option not in known:
            listed = f"(known: {', '.join(known)})" if known else "(it has none)"
            what = f"{name} has no option called {option!r} {listed}"
            yield Problem(what, fix=did_you_mean(option, known, listed=True), field=f"options.{option}")
        elif get_origin(types[option]) is not Literal:  # the factory itself checks the choices of a Literal
            try:
                TypeAdapter(types[option]).validate_python(value, strict=True)
            except ValidationError as error:
                # The user may have written a secret here instead of the name of its variable: do not quote it.
                what = (
                    f"{option} is {value!r}" if "env" not in option.split("_") else f"{option} is not what it should be"
                )
                yield Problem(what, fix=error.errors()[0]["msg"].lower(), field=f"options.{option}")
