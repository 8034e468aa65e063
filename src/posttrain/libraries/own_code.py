"""Loading of a user's own classes and functions, for the processes that run such code; nothing else imports this file."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.user_files import run_file


def load(where: str) -> Any:
    """Load the class or function at ``package.module:Name``, ``package.module.Name`` or ``path/to/file.py:Name``.

    Raises: ConfigError when it does not exist; any error of the import.
    """
    path, colon, attribute = where.rpartition(":") if ":" in where else where.rpartition(".")
    if not path or not attribute:
        what = f"{where!r} names no class: it is written package.module:Class, or path/to/file.py:Class"
        raise ConfigError(Problem(what))
    module = load_file(path) if colon == ":" and path.endswith(".py") else _module(path)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ConfigError(Problem(f"{path} has no class {attribute}", fix=f"it has: {', '.join(known) or 'no class'}"))
    return found


class Calls:
    """Calls functions, coroutine functions included, on one event loop. For one thread."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def call(self, function: Any, *positional: Any, **named: Any) -> Any:
        """Call a function and return its result, awaited where it is a coroutine."""
        value = function(*positional, **named)
        if not inspect.isawaitable(value):
            return value
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_awaited(value))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


async def _awaited(value: Any) -> Any:
    return await value


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            Problem(f"there is no module {name}: {error}", fix="install it, or use a .py file")
        ) from error


def load_file(path: str) -> ModuleType:
    """Load a Python file as a module with a unique name: files of the same name in different folders stay apart.

    Raises: ConfigError when there is no such file; any error of its own code.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(Problem(f"there is no file {file}"))
    file = file.resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    return sys.modules.get(name) or run_file(name, file)
