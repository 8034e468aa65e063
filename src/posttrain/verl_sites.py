"""Values of names at a place in a function of a checkout: the statements that give them, and the keys that these read.

A name's statements are those before the place, in the blocks around it: an assignment, or whole loops and branches that assign
or extend the name. Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Methods that change a list, a set or a mapping
_CHANGES = frozenset(("append", "extend", "insert", "add", "update", "setdefault"))
_OWN_NAMES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a function at a place in it."""

    given: Mapping[str, tuple[ast.stmt, ...]]  # by statements, in their order
    looped: Mapping[str, int]  # by a loop around the place, in its other turns or at its head: the line

    def value(self, name: str) -> ast.expr | None:
        """Return the expression that one plain assignment gives a name; None for other names."""
        match self.given.get(name):
            case (ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value),):
                return value
        return None

    def statements(self, name: str) -> list[ast.stmt]:
        """Return the statements that give a name its value, and other names that they both read and store."""
        found, left = {}, [name]
        while left:
            for statement in self.given.get(left.pop(), ()):
                if id(statement) not in found:
                    found[id(statement)] = statement
                    left += set(read_in([statement])) & set(stored_in([statement]))
        return sorted(found.values(), key=lambda each: each.lineno)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Expressions of one function, to be evaluated with the names that it assigns."""

    file: Path
    names: Names
    keys: frozenset[str]  # of the configuration that they read; "" for all of it
    optional: frozenset[str] = frozenset()  # of these, read with a default


def names_at(function: ast.FunctionDef, place: ast.AST) -> Names:
    """Return the names that a function has given values before a place in it."""
    given: dict[str, list[ast.stmt]] = {}
    looped: dict[str, int] = {}
    # Of every loop around the place: names that it changes behind the place
    carried: list[tuple[int, set[str]]] = []
    for block, index in _path(function.body, place):
        for statement in block[:index]:
            replaced = _replaced(statement)
            for name in stored_in([statement]):
                if name in replaced:
                    given[name] = [statement]
                    looped.pop(name, None)
                else:
                    given.setdefault(name, []).append(statement)
        around = block[index]
        behind = set(stored_in(block[index + 1 :]))
        for line, names in carried:
            names |= {name for name in behind if name not in looped}
            looped |= {name: line for name in names if name not in _given_below(given, line)}
        if isinstance(around, ast.For | ast.AsyncFor | ast.While):
            carried.append((around.lineno, set()))
        for name in _heads(around):
            looped[name] = around.lineno
            given.pop(name, None)
    return Names(given={name: tuple(each) for name, each in given.items()}, looped=looped)


def reached(values: Sequence[ast.AST], names: Names, known: Iterable[str]) -> Iterator[ast.AST]:
    """Yield the nodes of expressions, and of the statements that give the names in them; ``known`` names have their values."""
    seen, left = {*known}, list(values)
    while left:
        for node in ast.walk(left.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in names.given and node.id not in seen:
                seen.add(node.id)
                left += names.statements(node.id)


def site_of(file: Path, nodes: Sequence[ast.AST], names: Names, *, root: str) -> Site:
    """Return the site of expressions that reach these nodes; ``root``, such as ``self.config.``, leads to the configuration."""
    keys = set(keys_in(nodes, root))
    whole = root.rstrip(".")
    parts = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    if any(isinstance(node, ast.expr) and id(node) not in parts and ast.unparse(node) == whole for node in nodes):
        keys.add("")
    return Site(file=file, names=names, keys=frozenset(keys), optional=frozenset(_keys_with_default(nodes, root)))


def keys_in(nodes: Iterable[ast.AST], root: str) -> Iterator[str]:
    """Yield the longest chains of attributes behind ``root``, and keys that ``.get`` and ``getattr`` read there."""
    nodes = list(nodes)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    inner |= {id(node.args[0]) for node in nodes if _is_getattr(node)}  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in inner and ast.unparse(node).startswith(root):
            chain = ast.unparse(node).removeprefix(root)
            if chain.rpartition(".")[2] != "get":
                yield chain
    yield from _keys_with_default(nodes, root)


def stored_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements assign, or whose content they change; those of functions and comprehensions left out."""
    for node in _outside(nodes):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in _CHANGES:
                yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                yield name


def read_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that statements or expressions read, each once; of ``x += 1`` and ``x[0] = 1``, too."""
    found = []
    for each in (each for node in nodes for each in ast.walk(node)):
        if isinstance(each, ast.AugAssign):
            found += [name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)]
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            found.append(each.id)
    return list(dict.fromkeys(found))


def _path(block: list[ast.stmt], place: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """The blocks around a place, from the outside, each with the index of the statement that holds the place."""
    for index, statement in enumerate(block):
        if any(each is place for each in ast.walk(statement)):
            return [(block, index), *(step for inner in _blocks(statement) for step in _path(inner, place))]
    return []


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for each in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield each.body


def _replaced(statement: ast.stmt) -> set[str]:
    """The names whose earlier values a statement replaces without reading them."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = {each.id for target in targets for each in _assigned(target)}
    return names - set(read_in([statement.value]))


def _assigned(target: ast.expr) -> Iterator[ast.Name]:
    if isinstance(target, ast.Name):
        yield target
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _assigned(each)


def _heads(statement: ast.stmt) -> set[str]:
    """The names that the head of a compound statement gives values."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.For | ast.AsyncFor):
        targets = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        targets = [each.optional_vars for each in statement.items if each.optional_vars is not None]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _given_below(given: Mapping[str, Sequence[ast.stmt]], line: int) -> set[str]:
    """The names that are given their values behind a line alone: again in every turn of a loop that begins there."""
    return {name for name, each in given.items() if each and each[0].lineno > line}


def _outside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes without those of functions, classes and comprehensions, whose names are their own."""
    for node in nodes:
        if isinstance(node, _OWN_NAMES):
            continue
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            children = [node.generators[0].iter]
        yield from _outside(children)


def _keys_with_default(nodes: Iterable[ast.AST], root: str) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="get", value=section), args=[ast.Constant(value=str(name)), *_]):
                above = ast.unparse(section)
            case ast.Call(func=ast.Name(id="getattr"), args=[section, ast.Constant(value=str(name)), _]):
                above = ast.unparse(section)
            case _:
                continue
        if f"{above}.".startswith(root):
            yield f"{above}.{name}".removeprefix(root)


def _is_getattr(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and bool(node.args)
    )
