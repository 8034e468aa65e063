"""A user's own class or function, written package.module:Name or path/to/file.py:Name, checked from its source, not run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import ConfigError, Problem, did_you_mean, nearest
from posttrain.user_files import bound_names, module_file, parse_file, source_file

Function = ast.FunctionDef | ast.AsyncFunctionDef
OBJECT = "object"


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A class or function at the top level of a user's file."""

    where: str  # as the user wrote it
    # None: the name is imported, assigned or defined conditionally, and only running the file tells its parameters.
    definition: Function | ast.ClassDef | None
    tree: ast.Module

    @property
    def is_class(self) -> bool:
        return isinstance(self.definition, ast.ClassDef)


def find(where: str, *, holds: str) -> OwnCode:
    """Find what ``where`` names. ``holds`` describes it in messages, such as "your environment".

    Raises: ConfigError when the file, the module or the name is not there, or the file is not Python.
    """
    path, colon, name = where.rpartition(":") if ":" in where else where.rpartition(".")
    if not path or not name:
        what = f"{where!r} names no class: it is written package.module:Class, or path/to/file.py:Class"
        raise ConfigError(Problem(what))
    is_file = colon == ":" and (path.endswith(".py") or Path(path).expanduser().suffix == ".py" or "/" in path)
    file = source_file(path, holds=holds) if is_file else module_file(path, asked=where)
    tree = parse_file(path, file)
    definitions = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    if name not in definitions and not {name, "*"} & bound_names(tree):
        public = [each for each in definitions if not each.startswith("_")]
        what = f"{path} defines no {name!r} (it defines: {', '.join(public) or 'no class or function'})"
        raise ConfigError(Problem(what, fix=did_you_mean(name, public, listed=True)))
    return OwnCode(where, definitions.get(name), tree)


def own_code_problems(
    where: str, names: Collection[str], *, field: str, settings: str, holds: str, given: int = 1
) -> Iterator[Problem]:
    """Yield the problems of a call of the user's code: with ``given`` positional arguments, and keyword arguments of these names.

    Args: field is that of ``where``; settings, that of the section which holds the keyword arguments.
    """
    try:
        own = find(where, holds=holds)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(problem.what, fix=problem.fix, field=field)
        return
    yield from call_problems(own, names, field=field, settings=settings, given=given)


def call_problems(own: OwnCode, names: Collection[str], *, field: str, settings: str, given: int) -> Iterator[Problem]:
    """Yield the problems of calling it with ``given`` positional arguments and keyword arguments of these names."""
    if own.definition is None or own.definition.decorator_list:
        return  # a decorator may have changed its parameters
    arguments = _arguments(own.definition, own.tree)
    if arguments is None:
        return
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if isinstance(own.definition, ast.ClassDef):
        positional = positional[1:]
    if given > len(positional) and arguments.vararg is None:
        many = "1 argument" if given == 1 else f"{given} arguments"
        what = f"{own.where} is called with {many} and its settings, and takes {len(positional) or 'none'}"
        yield Problem(what, fix="let its first parameter be what it is called with", field=field)
        return
    with_default = {*positional[len(positional) - len(arguments.defaults) :]} if arguments.defaults else set()
    keywords = {each.arg for each in arguments.kwonlyargs}
    needed = [each for each in positional[given:] if each not in with_default]
    needed += [
        each.arg for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    known = [*positional[given:], *(each.arg for each in arguments.kwonlyargs)]
    for name in names:
        if name not in known and (arguments.kwarg is None or name in positional[:given]):
            what = f"{own.where} takes no setting {name!r} (it takes: {', '.join(known) or 'none'})"
            yield Problem(what, fix=did_you_mean(name, known, listed=True), field=f"{settings}.{name}")
    meant = {nearest(name, known) for name in names if name not in known}
    for name in needed:
        if name not in names and name not in meant:
            kind = "keyword " if name in keywords else ""
            yield Problem(
                f"{own.where} needs the {kind}setting {name!r}", fix=f"give {settings}.{name}", field=settings
            )


def needed_arguments(own: OwnCode) -> list[str]:
    """Return the parameters without a default, but for self; empty where only running the file would tell."""
    if own.definition is None or own.definition.decorator_list:
        return []
    arguments = _arguments(own.definition, own.tree)
    if arguments is None:
        return []
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    needed = positional[: len(positional) - len(arguments.defaults)]
    needed += [
        each.arg for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    return needed[own.is_class :] if positional else needed


def method_problems(own: OwnCode, methods: Sequence[str], *, field: str) -> Iterator[Problem]:
    """Yield the methods that a class lacks; of one with bases or decorators from elsewhere nothing is known."""
    if not isinstance(own.definition, ast.ClassDef) or own.definition.decorator_list:
        return
    found = _members(own.definition, own.tree)
    if found is None or "__getattr__" in found:
        return
    for name in methods:
        if name not in found:
            what = f"{own.where} has no method {name!r} (it has: {', '.join(each for each in found if each[0] != '_')})"
            near = nearest(name, [each for each in found if each not in methods])
            yield Problem(what, fix=f"rename {near} to {name}" if near else f"define {name}", field=field)


def _arguments(definition: Function | ast.ClassDef, tree: ast.Module) -> ast.arguments | None:
    """The parameters of a function, or of a class's __init__; None where they are not in this file."""
    if not isinstance(definition, ast.ClassDef):
        return definition.args
    for each in definition.body:
        if isinstance(each, Function) and each.name in ("__init__", "__new__"):
            return None if each.decorator_list else each.args
    bases = _bases(definition, tree)
    if bases is None or definition.keywords or len(bases) > 1:
        return None
    if bases:
        return _arguments(bases[0], tree)
    return ast.arguments(posonlyargs=[], args=[ast.arg("self")], kwonlyargs=[], kw_defaults=[], defaults=[])


def _members(definition: ast.ClassDef, tree: ast.Module) -> list[str] | None:
    """The names in a class and its bases; None when a base is not in this file."""
    bases = _bases(definition, tree)
    if bases is None or definition.keywords:
        return None
    found = [each.name for each in definition.body if isinstance(each, Function)]
    found += [
        target.id for each in definition.body if isinstance(each, ast.Assign) for target in each.targets
        if isinstance(target, ast.Name)
    ]  # fmt: skip
    for base in bases:
        more = _members(base, tree)
        if more is None:
            return None
        found += more
    return found


def _bases(definition: ast.ClassDef, tree: ast.Module) -> list[ast.ClassDef] | None:
    """The classes that a class inherits from, without object; None when one of them is not in this file, above it."""
    above = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.lineno < definition.lineno]
    classes = {node.name: node for node in above}
    names = [base.id if isinstance(base, ast.Name) else "" for base in definition.bases]
    if any(name != OBJECT and name not in classes for name in names):
        return None
    return [classes[name] for name in names if name != OBJECT]
