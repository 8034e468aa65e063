"""Parts of a checkout's files, run without the rest: a class needs neither the cluster nor the trainer that its file imports.

A file is run as far as a name needs it: the statements at its top level that define the name, and those whose names these use.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.checkout_files import file_of, imported_names
from posttrain.errors import ConfigError
from posttrain.libraries.verl import modules as verl_modules
from posttrain.user_files import loading_problem, parse_file, run_statements
from posttrain.verl_sites import Site, read_in, stored_in

_VALUE = "value_of_the_expression"


class NotBound(Exception):
    """A name that nothing at the top of a file has."""


class Checkout:
    """The modules of a checkout, below the folder that they are imported from."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, tuple[ast.Module, ModuleType, set[int]]] = {}
        inner = folder / "verl"
        verl_modules.provide(inner if (inner / "__init__.py").is_file() else None)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))

    def name(self, file: Path, name: str) -> Any:
        """Return what a name stands for at the top of a file. Raises: NotBound without one; ConfigError, with the file's line."""
        source, module, done = self._opened(file)
        given = imported_names(source).get(name)
        inner = file_of(given[0], file, [self.folder]) if given else None
        if given and inner is not None and inner.is_relative_to(self.folder) and not given[0].startswith("verl.utils"):
            return self.name(inner, given[1])
        wanted = [place for place in _needed(source, name) if place not in done]
        if name not in vars(module) and not wanted:
            # Imported inside a function
            if given is None:
                raise NotBound(name)
            return getattr(importlib.import_module(given[0]), given[1])
        try:
            run_statements(module, file, [source.body[place] for place in wanted])
        except (Exception, SystemExit) as error:
            raise ConfigError(loading_problem(error, self.folder, name)) from error
        done.update(wanted)
        if name not in vars(module):  # defined under a condition that is not met
            raise NotBound(name)
        return vars(module)[name]

    def _further(self, file: Path, name: str) -> Any:
        """Load a name that another module takes out of one that is run in parts. Raises: AttributeError."""
        try:
            if name.startswith("__"):
                raise NotBound(name)
            return self.name(file, name)
        except NotBound:
            raise AttributeError(f"{file} has no {name}") from None

    def _opened(self, file: Path) -> tuple[ast.Module, ModuleType, set[int]]:
        if file not in self._files:
            parts = file.relative_to(self.folder).with_suffix("").parts if file.is_relative_to(self.folder) else ()
            module = ModuleType(".".join(parts) or file.stem)
            module.__file__, module.__package__ = str(file), ".".join(parts[:-1])
            vars(module)["__getattr__"] = partial(self._further, file)
            # Dataclasses look their module up by its name; the package around it may import further names from it
            sys.modules.setdefault(module.__name__, module)
            self._files[file] = (parse_file(str(file), file), module, set())
        return self._files[file]


class Values:
    """The names of a function, each evaluated at its first use: those given, those that it assigns, those of its file."""

    def __init__(self, checkout: Checkout, site: Site, given: Mapping[str, Any]):
        self._checkout, self._site = checkout, site
        self._known = dict(given)

    def evaluated(self, value: ast.expr) -> Any:
        """Evaluate an expression of the function. Raises: whatever its code raises."""
        stored = ast.copy_location(ast.Name(id=_VALUE, ctx=ast.Store()), value)
        space = self._run([ast.copy_location(ast.Assign(targets=[stored], value=value), value)])
        return getattr(space, _VALUE)

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Run statements of the function, for what they do to given objects. Raises: whatever their code raises."""
        self._run(list(statements))

    def function(self, definition: ast.FunctionDef) -> Any:
        """Return a method of a class in the same file as a function. Raises: whatever loading its names raises."""
        space = ModuleType(self._site.file.stem)
        for name in read_in([definition]):
            with contextlib.suppress(NotBound):
                setattr(space, name, self._checkout.name(self._site.file, name))
        run_statements(space, self._site.file, [definition])
        return getattr(space, definition.name)

    def _run(self, statements: list[ast.stmt]) -> ModuleType:
        """Run statements of the function, with the names that they read and do not store. Returns: the names behind them."""
        space = ModuleType(self._site.file.stem)
        stored = {*stored_in(statements)}
        for name in read_in(statements):
            if name in self._known or name not in stored:
                with contextlib.suppress(NotBound):  # a built-in name, or one that the expression binds
                    setattr(space, name, self._value(name))
        run_statements(space, self._site.file, statements)
        return space

    def _value(self, name: str) -> Any:
        """Raises: NotBound for a name that neither the function nor its file binds."""
        if name not in self._known:
            if statements := self._site.names.statements(name):
                space = self._run(statements)
                for each in stored_in(statements):
                    self._known.setdefault(each, getattr(space, each, None))
            else:
                self._known[name] = self._checkout.name(self._site.file, name)
        return self._known[name]


def _needed(source: ast.Module, name: str) -> list[int]:
    """The places of the statements at the top of a file that a name needs, in their order."""
    defined: dict[str, list[int]] = {}
    for place, node in enumerate(source.body):
        for each in _binds(node):
            defined.setdefault(each, []).append(place)
    wanted: set[int] = set()
    left = [name]
    while left:
        for place in defined.get(left.pop(), ()):
            if place not in wanted:
                wanted.add(place)
                left += [each.id for each in ast.walk(source.body[place]) if isinstance(each, ast.Name)]
    first = [place for place, node in enumerate(source.body) if isinstance(node, ast.ImportFrom) and _always(node)]
    return sorted(wanted.union(first)) if wanted else []


def _always(node: ast.ImportFrom) -> bool:
    return node.module == "__future__" or any(each.name == "*" for each in node.names)


def _binds(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name).split(".")[0] for one in each.names)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield each.name
