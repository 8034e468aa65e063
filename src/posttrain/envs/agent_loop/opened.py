"""The class of an agent loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.libraries.own_code import load as load_own
from posttrain.libraries.verl import modules as verl_modules
from posttrain.user_files import loading_problem


def class_of(where: str, root: str | None = None) -> Any:
    """Load the class, whose package may lie in the folder ``root``. Raises: ConfigError, with its file's line where its own code
    raises."""
    if root is not None and (folder := str(Path(root).expanduser().resolve())) not in sys.path:
        sys.path.append(folder)  # last, so that it replaces no library
    verl_modules.provide()
    try:
        found = load_own(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code
        raise ConfigError(loading_problem(error, Path(root or ".").expanduser().resolve(), where)) from None
    if not callable(getattr(found, "run", None)):
        what = f"{where} has no coroutine run, which plays an episode"
        raise ConfigError(Problem(what, fix="name a subclass of AgentLoopBase"))
    return found


def load(settings: Mapping[str, Any]) -> None:
    """Load the class, so that a run does not begin with one that cannot be. Raises: ConfigError."""
    class_of(str(settings["class_name"]), settings.get("root"))
