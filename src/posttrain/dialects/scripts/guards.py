"""Conditions on the configuration around a call in a checkout's code, evaluated without running it.

``if self.config.algorithm.get("filter", {}).get("enable", False): batch = keep(batch)`` calls ``keep`` only where the
configuration has that. Three values: a condition that depends on anything else is unknown, and its call may happen.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.dialects.trees import NOTHING
from posttrain.verl_sites import Names, names_at

# Reads a key of the configuration: its value, a section as a mapping, or NOTHING where it is not there
Look = Callable[[str], Any]

_UNKNOWN = object()
_CONFIG = ("self.config", "config", "self.cfg", "cfg")
_DEPTH = 8  # names that are followed from one to the next
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A function of a checkout, with what its conditions may read beside the configuration."""

    function: ast.FunctionDef
    above: Mapping[
        ast.AST, tuple[ast.AST, str]
    ]  # every node inside -> the node that holds it, and in which of its fields
    enumerations: Mapping[str, str]  # ``CLASS.MEMBER`` -> its text
    changed: frozenset[str]  # keys that the code itself assigns


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A place in a function, with the conditions under which it is reached."""

    line: int
    code: Code
    node: ast.AST

    def may_happen(self, look: Look) -> bool:
        """Return False where the configuration alone decides that the place is not reached."""
        evaluation = _Evaluation(self, look)
        for test, wanted in self._tests():
            found = evaluation.of(test)
            if found is not _UNKNOWN and evaluation.is_true(found) != wanted:
                return False
        return True

    def _tests(self) -> Iterator[tuple[ast.expr, bool]]:
        """The conditions around the place, each with the value that it needs, the nearest first."""
        node = self.node
        while node in self.code.above:
            node, within = self.code.above[node]
            if isinstance(node, ast.If) and within in ("body", "orelse"):
                yield node.test, within == "body"


def code_of(function: ast.FunctionDef, sources: Sequence[ast.Module] = ()) -> Code:
    """Collect what conditions of a function may read; ``sources`` hold the enumerations that they may compare with, and the
    statements that change the configuration."""
    above = {}
    for node in ast.walk(function):
        for name, value in ast.iter_fields(node):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not isinstance(each, ast.expr_context):
                    above[each] = (node, name)
    return Code(
        function=function,
        above=above,
        enumerations={name: text for each in sources for name, text in _enumerations(each)},
        changed=frozenset(key for each in sources for key in _assigned(each)),
    )


def guarded(code: Code, node: ast.expr) -> Guarded:
    """Return a place in a function."""
    return Guarded(line=node.lineno, code=code, node=node)


def _enumerations(source: ast.Module) -> Iterator[tuple[str, str]]:
    for owner in source.body:
        for each in owner.body if isinstance(owner, ast.ClassDef) else ():
            if (
                isinstance(each, ast.Assign)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                for target in each.targets:
                    yield f"{owner.name}.{ast.unparse(target)}", each.value.value  # type: ignore[attr-defined]


def _assigned(source: ast.Module) -> Iterator[str]:
    """The keys that a file's statements assign: ``config.actor.use_mine = True``."""
    for node in ast.walk(source):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in (each for each in targets if isinstance(each, ast.Attribute)):
            text = ast.unparse(target)
            root = next((each for each in _CONFIG if text.startswith(f"{each}.")), None)
            if root is not None:
                yield text.removeprefix(f"{root}.")


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of the configuration, or what is below a key that is not there."""

    key: str


class _Evaluation:
    def __init__(self, place: Guarded, look: Look):
        self._place, self._look = place, look
        self._enumerations, self._changed = place.code.enumerations, place.code.changed

    @cached_property
    def _names(self) -> Names:
        return names_at(self._place.code.function, self._place.node)

    def of(self, node: ast.expr, depth: int = _DEPTH) -> Any:
        """The value of an expression; _UNKNOWN where more than the configuration decides."""
        if not depth:
            return _UNKNOWN
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if text in _CONFIG:
            return _Section("")
        if text in self._enumerations:
            return self._enumerations[text]
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                found = [self.of(each, depth) for each in items]
                return _UNKNOWN if _UNKNOWN in found else found
            case ast.Dict(keys=[]):
                return {}
            case ast.Name(id=name) if name not in self._names.looped and (given := self._names.value(name)) is not None:
                return self.of(given, depth - 1)
            case ast.Attribute(value=inner, attr=attr):
                return self._item(self.of(inner, depth), attr)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str(attr))):
                return self._item(self.of(inner, depth), attr)
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=str(attr)), *rest]):
                return self._item(self.of(inner, depth), attr, self.of(rest[0], depth) if rest else None)
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(attr)), otherwise]):
                return self._item(self.of(inner, depth), attr, self.of(otherwise, depth))
            case ast.Call(func=ast.Name(id="bool"), args=[inner]):
                found = self.of(inner, depth)
                return found if found is _UNKNOWN else self.is_true(found)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                found = self.of(inner, depth)
                return found if found is _UNKNOWN else not self.is_true(found)
            case ast.BoolOp(op=kind, values=values):
                return self._either(isinstance(kind, ast.Or), values, depth)
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                return self._compared(kind, left, right, depth)
        return _UNKNOWN

    def _item(self, section: Any, name: str, otherwise: Any = _UNKNOWN) -> Any:
        if isinstance(section, Mapping):
            return section.get(name, otherwise)
        if not isinstance(section, _Section):
            return _UNKNOWN
        key = f"{section.key}.{name}".lstrip(".")
        if key in self._changed:
            return _UNKNOWN
        value = self._look(key)
        return otherwise if value is NOTHING else _Section(key) if isinstance(value, Mapping) else value

    def is_true(self, value: Any) -> bool:
        """Return the truth of a known value."""
        return bool(self._look(value.key)) if isinstance(value, _Section) and value.key else bool(value)

    def _either(self, is_or: bool, values: Sequence[ast.expr], depth: int) -> Any:
        """``and`` and ``or``: one known value may decide beside unknown ones."""
        found: Any = not is_or
        unknown = False
        for each in values:
            found = self.of(each, depth)
            if found is not _UNKNOWN and self.is_true(found) == is_or:
                # Behind an unknown value its truth is known, and not which of the two is the result
                return is_or if unknown else found
            unknown = unknown or found is _UNKNOWN
        return _UNKNOWN if unknown else found

    def _compared(self, kind: ast.cmpop, left: ast.expr, right: ast.expr, depth: int) -> Any:
        values = [self.of(left, depth), self.of(right, depth)]
        if _UNKNOWN in values or type(kind) not in _COMPARES:
            return _UNKNOWN
        if isinstance(values[1], _Section) and isinstance(values[0], str) and isinstance(kind, ast.In | ast.NotIn):
            is_there = self._look(f"{values[1].key}.{values[0]}".lstrip(".")) is not NOTHING
            return is_there is isinstance(kind, ast.In)
        try:
            return _COMPARES[type(kind)](values[0], values[1])
        except TypeError:
            return _UNKNOWN
