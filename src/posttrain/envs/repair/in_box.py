"""The program that runs tests in a box: it loads the repository from texts, makes the calls, and says what each came to.

Its source goes into the box; nothing of it runs anywhere else. It knows the calls, and not what they should come to.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def run_calls(written: str) -> list[dict[str, Any]]:
    """Make calls. ``written``: JSON of {files: {path: text}, calls: [[call, arguments], ...]}. Returns: {value} or {error,
    message} for each; a value that JSON cannot hold is an error."""
    given = json.loads(written)
    sys.meta_path.insert(0, _Texts(given["files"]))
    return [_outcome(call, arguments) for call, arguments in given["calls"]]


def _outcome(call: str, arguments: Sequence[Any]) -> dict[str, Any]:
    module, _, function = call.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)(*arguments)
        return {"value": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001 - of a program that a model wrote
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _Texts.paths]
        place = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        if isinstance(error, SyntaxError):
            place = f" ({error.filename}, line {error.lineno})"
        return {"error": type(error).__name__, "message": f"{error}"[:200] + place}


class _Texts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules among the texts of the repository."""

    paths: tuple[str, ...] = ()

    def __init__(self, files: Mapping[str, str]):
        self.files = files
        _Texts.paths = tuple(files)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        base = name.replace(".", "/")
        for file in (f"{base}/__init__.py", f"{base}.py"):
            if file in self.files:
                package = file.endswith("__init__.py")
                return importlib.machinery.ModuleSpec(name, self, origin=file, is_package=package)
        # A folder without __init__.py is a package all the same
        if any(file.startswith(f"{base}/") for file in self.files):
            return importlib.machinery.ModuleSpec(name, self, origin=None, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        file = module.__spec__.origin if module.__spec__ else None
        if file is not None:
            exec(compile(self.files[file], file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - in a box
