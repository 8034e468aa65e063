"""Environment managers of a fork's trainer: classes that step copies of an environment with the actions of the policy.

Its program makes two of them with a function of the checkout, for training and validation, and hands them to the trainer, whose
loop passes the sampler and one of them to one call. Files are parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkout_files import parsed
from posttrain.dialects.scripts.own_sources import imports_of

ENVIRONMENT = "env_manager"  # ours, which plays them
# Calls of such a loop that are done here: copies of rows for an even split, the returns of steps, the penalty of a turn
DONE_HERE = frozenset(("adjust_batch", "compute_step_discounted_returns", "apply_invalid_action_penalty"))
_DEPTH = 3  # files that pass a function on


@dataclass(frozen=True, slots=True, kw_only=True)
class Managers:
    """A function of a checkout that makes environment managers."""

    function: str
    file: Path
    line: int
    folder: Path  # the checkout, from which its modules are imported

    @property
    def adds(self) -> tuple[str, ...]:
        """Return the overrides that let a run play them."""
        settings = "++posttrain.environment.settings"
        return (
            f"++posttrain.environment.name={ENVIRONMENT}",
            f"{settings}.file='{self.file}'",
            f"{settings}.folder='{self.folder}'",
            f"{settings}.function={self.function}",
        )


def managers_of(program: Path, handed: Sequence[str], roots: Sequence[Path]) -> Managers | None:
    """Find the function of a program that makes the managers which its trainer's loop hands on beside the sampler.

    Args: ``handed`` are the attributes of the trainer among the arguments of that call.
    Returns: None where the program makes no pair of them from its configuration.
    """
    source = parsed(program)
    if source is None:
        return None
    imported = imports_of(source)
    names = {
        one.value.id: str(one.arg)
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        for one in node.keywords
        if isinstance(one.value, ast.Name)
    }
    for node in ast.walk(source):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=_)])],
                value=ast.Call(func=ast.Name(id=function), args=[ast.Name()]),
            ) if names.get(first) in handed and (given := imported.get(function)) is not None:
                return _defined(given.module, given.name, program, roots, _DEPTH)
    return None


def handed_on(call: ast.Call) -> list[str]:
    """The attributes of the trainer among the arguments of a call: ``envs=self.envs``."""
    values = [*call.args, *(one.value for one in call.keywords)]
    return [
        each.attr
        for each in values
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]


def class_of(file: Path, name: str) -> tuple[str, int] | None:
    """The class of a file that its function makes for an environment's name, and its line: the last one constructed below the
    first ``if "word" in NAME`` whose word the name has. None where it is chosen in another way."""
    source = parsed(file)
    classes = {node.name: node.lineno for node in source.body if isinstance(node, ast.ClassDef)} if source else {}
    for node in ast.walk(source) if source else ():
        match node:
            case ast.If(test=ast.Compare(left=ast.Constant(value=str() as word), ops=[ast.In()])) if (
                word in name.lower()
            ):
                made = [
                    each.func.id
                    for statement in node.body
                    for each in ast.walk(statement)
                    if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in classes
                ]
                if made:
                    return made[-1], classes[made[-1]]
    return None


def _defined(module: str, name: str, beside: Path, roots: Sequence[Path], depth: int) -> Managers | None:
    """The file that defines a function which a module has: its own, or one that it imports it from."""
    found = _file(module, beside, roots)
    source = parsed(found[0]) if found is not None else None
    if found is None or source is None or not depth:
        return None
    file, folder = found
    for node in source.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Managers(function=name, file=file, line=node.lineno, folder=folder)
    given = imports_of(source)
    if name in given:
        return _defined(given[name].module, given[name].name, file, roots, depth - 1)
    for each in (one.module for one in given.values() if one.name == "*"):
        if (made := _defined(each, name, file, roots, depth - 1)) is not None:
            return made
    return None


def _file(module: str, beside: Path, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """The file of a module or package, and the folder from which its full name is imported."""
    above = len(module) - len(module.lstrip("."))
    parts = [part for part in module.strip(".").split(".") if part]
    if above:
        home = beside.parents[above - 1]
        folder = home
        while (folder / "__init__.py").is_file():
            folder = folder.parent
        places = [(home, folder)]
    else:
        places = [(root, root) for root in roots]
    for home, folder in places:
        for path in (home.joinpath(*parts).with_suffix(".py"), home.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path, folder
    return None
