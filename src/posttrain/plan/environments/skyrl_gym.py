"""The environment skyrl_gym: the ids that the package registers, and the user's own classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.errors import Problem, did_you_mean
from posttrain.libraries.skyrl_names import RUN_CODE, registered
from posttrain.plan.own_code import own_code_problems
from posttrain.registry import ENV_CHECKS, is_installed, missing_library

# What SkyRL's environments are made with.
ARGUMENTS = ("env_config", "extras")


@ENV_CHECKS.register("skyrl_gym")
def skyrl_gym(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    if not is_installed("skyrl_gym"):
        problem = missing_library("skyrl_gym", "the environment skyrl_gym")
        yield Problem(problem.what, fix=problem.fix, field=field)
    own = settings.get("register") or {}
    for name, where in own.items() if isinstance(own, Mapping) else ():
        yield from _class_problems(str(where), f"{field}.register.{name}")
    if (name := settings.get("env_class")) is not None:
        yield from env_class_problems(str(name), settings, f"{field}.env_class")
    known = [*registered(), *own]
    configs = settings.get("configs") or {}
    for name in configs if isinstance(configs, Mapping) else ():
        if name not in known and ":" not in name:
            what = f"configs has an entry for {name!r}, which is no environment (known: {', '.join(known)})"
            yield Problem(what, fix=did_you_mean(name, known, listed=True), field=f"{field}.configs.{name}")


def env_class_problems(name: str, settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Yield the problems of an env_class, of the settings or of a row."""
    known = [*registered(), *(settings.get("register") or {})]
    if ":" in name and name not in known:
        yield from _class_problems(name, field)
    elif name not in known:
        what = f"skyrl-gym has no environment {name!r} (known: {', '.join(sorted(known))})"
        fix = did_you_mean(name, known, listed=True) or "add it with environment.settings.register"
        yield Problem(what, fix=fix, field=field)
    elif name in RUN_CODE and not settings.get("allow_unboxed_code"):
        what = f"the environment {name} executes model-written code without a sandbox"
        fix = "use the reward code, which sandboxes it, or accept it with environment.settings.allow_unboxed_code=true"
        yield Problem(what, fix=fix, field=field)


def _class_problems(where: str, field: str) -> Iterator[Problem]:
    yield from own_code_problems(where, ARGUMENTS, field=field, settings=field, holds="your environment class", given=0)
