"""The environment managers of a checkout: made by its own function, once per place, and kept for the groups that follow."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.envs.env_manager.local_ray import as_ray, make_one_of_each
from posttrain.errors import ConfigError, Problem
from posttrain.user_files import loading_problem

_made: dict[str, Manager] = {}
_RAY = as_ray()


class Manager:
    """A fork's manager, with its place for messages."""

    def __init__(self, manager: Any, copies: int) -> None:
        self._manager, self._copies = manager, copies

    def title(self, method: str) -> str:
        """Name a method with its file and line."""
        kind = type(self._manager)
        function = getattr(kind, method, None)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"{kind.__name__}.{method}{place}"

    def reset(self, row: Any) -> Any:
        """Begin a group. ``row``: what the data says under env_kwargs, for every copy; None without."""
        method = self._method("reset")
        names = list(inspect.signature(method).parameters)
        if not names:
            return method()
        given = None
        if row is not None:
            given = np.empty(self._copies, dtype=object)
            for place in range(self._copies):
                given[place] = copy.deepcopy(row)
        return method(**{"kwargs" if "kwargs" in names else names[0]: given})

    def step(self, actions: list[str]) -> Any:
        return self._method("step")(actions)

    def success(self, **given: Any) -> Any:
        evaluator = getattr(self._manager, "success_evaluator", None)
        return evaluator(**given) if evaluator is not None else {}

    def _method(self, name: str) -> Any:
        found = getattr(self._manager, name, None)
        if not callable(found):
            raise wrong(f"{type(self._manager).__name__} has no method {name}")
        return found


def manager_of(made: Mapping[str, Any], *, copies: int, seed: int) -> Manager:
    """Return the manager of a place with so many copies; every place has one of its own.

    Raises: ConfigError when a package is missing, the function ends the program, or returns no two managers; what it raises.
    """
    key = json.dumps([made, copies, seed], sort_keys=True, default=str)
    if key not in _made:
        _made[key] = Manager(_make(made, copies, seed), copies)
    return _made[key]


def load(settings: Mapping[str, Any]) -> None:
    """Make the managers of a group of one, and one actor of every class among the actors that they hold.

    Raises: ConfigError for what cannot be imported or made.
    """
    made = made_by(**settings)
    folder = Path(made["folder"]).resolve()
    try:
        manager_of(made, copies=1, seed=0)
        make_one_of_each()
    except ConfigError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise ConfigError(loading_problem(error, folder, f"{made['function']} of {made['file']}")) from None
        # A server that is not there yet: the run starts later
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the fork's own code
        raise ConfigError(loading_problem(error, folder, f"{made['function']} of {made['file']}")) from None


def made_by(
    *, file: str, folder: str, function: str = "make_envs", config: Mapping[str, Any] | None = None,
    validates: bool = False, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the settings that a manager depends on, with their defaults."""
    return {"file": file, "folder": folder, "function": function, "config": dict(config or {}), "validates": validates}


def wrong(what: str) -> ConfigError:
    return ConfigError(Problem(what))


def _make(made: Mapping[str, Any], copies: int, seed: int) -> Any:
    from omegaconf import OmegaConf

    config = copy.deepcopy(dict(made["config"]))
    validates = made["validates"]
    data, env = config.setdefault("data", {}), config.setdefault("env", {})
    # The fork's own make one copy of every start for validation
    data |= {"train_batch_size": 1, "val_batch_size": copies if validates else 1}
    env["rollout"] = {**(env.get("rollout") or {}), "n": 1 if validates else copies}
    env["seed"] = seed
    where, folder = f"{made['function']} of {made['file']}", Path(made["folder"]).resolve()
    try:
        function = getattr(_module(Path(made["file"]).resolve(), folder), made["function"])
        managers = function(OmegaConf.create(config))
    except (ImportError, SystemExit) as error:
        problem = loading_problem(error, folder, f"{where}, for env.env_name={env.get('env_name')},")
        raise ConfigError(problem) from None
    if not isinstance(managers, (tuple, list)) or len(managers) != 2:
        raise wrong(
            f"{where} returned a {type(managers).__name__} instead of two managers, for training and validation"
        )
    return managers[1 if validates else 0]


def _module(file: Path, folder: Path) -> Any:
    """Import a file of a checkout by its full name, below the checkout's folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # Its environments use ray to step copies at once; here there is a process for every group
    sys.modules["ray"] = _RAY
    return importlib.import_module(".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"))
