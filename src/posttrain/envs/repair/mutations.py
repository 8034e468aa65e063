"""Bugs for a right program: every place of a module where one small change can make it wrong."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from posttrain.envs.repair.tasks import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_CALLED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list", "ljust": "rjust", "get": "pop",
}  # fmt: skip


def bugs_of(source: str, kinds: Sequence[Kind] = KINDS) -> list[tuple[Kind, str]]:
    """Return the module with one bug each, in the order of its places: the bug's kind and the whole text.

    Texts are written by ast.unparse, as ``plainly`` writes the right one, so that a bug is the only difference.
    """
    tree = ast.parse(source)
    found: list[tuple[Kind, str]] = []
    for number, node in enumerate(_inside_functions(tree)):
        for kind, change in _changes(node):
            if kind not in kinds:
                continue
            changed = copy.deepcopy(tree)
            change(_inside_functions(changed)[number])
            text = plainly(changed)
            if text != plainly(tree):
                found.append((kind, text))
    return found


def plainly(tree: ast.AST | str) -> str:
    """Write a module as all modules of tasks are written."""
    return ast.unparse(ast.parse(tree) if isinstance(tree, str) else tree) + "\n"


def _inside_functions(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of functions' bodies, and of constants of the module, in a fixed order."""
    assert isinstance(tree, ast.Module)
    bodies = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.Assign)]
    return [node for body in bodies for node in _without_annotations(body)]


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _without_annotations(child)


def _changes(node: ast.AST) -> Iterator[tuple[Kind, Callable[[ast.AST], None]]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            yield "comparison", lambda n: setattr(n, "ops", [_COMPARED[type(operator)]()])
        case ast.Constant(value=bool()):
            yield "flag", lambda n: setattr(n, "value", not node.value)
        case ast.Constant(value=int() as number):
            yield "boundary", lambda n: setattr(n, "value", number + 1)
            if number > 0:
                yield "boundary", lambda n: setattr(n, "value", number - 1)
        case ast.BinOp(op=operation) | ast.AugAssign(op=operation) if type(operation) in _CALCULATED:
            yield "operator", lambda n: setattr(n, "op", _CALCULATED[type(operation)]())
        case ast.BoolOp(op=joined):
            yield "condition", lambda n: setattr(n, "op", ast.Or() if isinstance(joined, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name() | ast.Subscript()):
            yield "operator", lambda n: setattr(n, "op", ast.UAdd())
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            yield "function", lambda n: setattr(n, "func", ast.Name(id=_CALLED[name], ctx=ast.Load()))
        case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLED:
            yield "function", lambda n: setattr(n.func, "attr", _CALLED[name])  # type: ignore[attr-defined]
    if (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue)
    ):
        yield "missing", lambda n: setattr(n, "test", ast.Constant(value=False))
    if isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield "arguments", lambda n: setattr(n, "args", n.args[::-1])  # type: ignore[attr-defined]
    if isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If):
        yield from _statements(node)


def _statements(
    node: ast.FunctionDef | ast.For | ast.While | ast.If,
) -> Iterator[tuple[Kind, Callable[[ast.AST], None]]]:
    """A statement that is left out, or that changes places with the next one."""
    plain = (ast.AugAssign, ast.Expr, ast.Assign)
    for place, statement in enumerate(node.body):
        documented = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if documented or not isinstance(statement, plain):
            continue
        if len(node.body) > 1 and not isinstance(statement, ast.Assign):
            yield "missing", lambda n, place=place: n.body.pop(place)  # type: ignore[misc]
        if place + 1 < len(node.body) and isinstance(node.body[place + 1], plain):
            yield "order", lambda n, place=place: n.body.insert(place, n.body.pop(place + 1))  # type: ignore[misc]
