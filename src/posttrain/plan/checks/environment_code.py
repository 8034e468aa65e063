"""The code of a checkout that an environment plays with, loaded before a run in a process of its own: a package that is missing
ends the request, and not the first episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.processes.child import Child, ChildFailed
from posttrain.registry import ENVS

LOAD_S = 300.0  # some forks read their games when the environments are made


def code_problems(name: str, settings: Mapping[str, Any], variables: Sequence[str]) -> Iterator[Problem]:
    """Yield why the code that an environment's settings name cannot be loaded; nothing for an environment without such code, and
    for code that takes longer than LOAD_S, which the run gives more time.

    Args: ``variables`` are further environment variables that the code may see.
    """
    if not (ENVS.is_built_in(name) and (function := ENVS.facts(name).loads)):
        return
    try:
        Child(function, dict(settings), load_s=LOAD_S, call_s=LOAD_S, variables=variables).close()
    except ConfigError as error:
        if isinstance(error.__cause__, ChildFailed) and isinstance(error.__cause__.__cause__, TimeoutError):
            return
        yield from error.problems
