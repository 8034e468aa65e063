"""device_mapping: a Python expression that gives a list of device ids, read without running it."""

from __future__ import annotations

import ast

from posttrain.config.placement import MOST_DEVICES

EXAMPLE = "write it as list(range(0,8)), [0,1,2,3], or list(range(0,4)) + list(range(8,12))"


def devices_of(value: str | list[int]) -> list[int]:
    """The ids in order. Understood are whole numbers, lists and tuples, list(...), range(...), + and - between them.

    Raises: ValueError, in words for the user: another expression, an empty list, an id twice or below 0.
    """
    ids = value if isinstance(value, list) else _evaluated(value)
    if isinstance(ids, int):
        raise ValueError(f"{value!r} is one number and no list of device ids")
    if not ids:
        raise ValueError(f"{value!r} names no device")
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ValueError(f"{value!r} holds something that is no device id")
    if min(ids) < 0:
        raise ValueError(f"{value!r} holds the id {min(ids)}, and ids count from 0")
    twice = sorted({one for one in ids if ids.count(one) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise ValueError(f"{value!r} names device {twice[0]} twice")
    return list(ids)


def _evaluated(text: str) -> int | list[int]:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no Python expression") from None
    except _NotUnderstood as error:
        raise ValueError(f"{text!r} holds {error}, which is not read: nothing in a device mapping is run") from None


class _NotUnderstood(Exception):
    """A part of the expression that is none of the few kinds."""


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=bool()):
            raise _NotUnderstood(ast.unparse(node))
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_number(item) for item in items]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _list(inner)
        case ast.Call(func=ast.Name(id="range"), args=[_, *more] as args, keywords=[]) if len(more) <= 2:
            numbers = [_number(arg) for arg in args]
            if len(numbers) == 3 and numbers[2] == 0:
                raise _NotUnderstood("a range with step 0")
            return _range(numbers)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() as operation, left=left, right=right):
            return _combined(operation, _value(left), _value(right), node)
    raise _NotUnderstood(ast.unparse(node))


def _combined(
    operation: ast.operator, left: int | list[int], right: int | list[int], node: ast.expr
) -> int | list[int]:
    if isinstance(left, list) and isinstance(right, list) and isinstance(operation, ast.Add):
        return [*left, *right]
    if isinstance(left, int) and isinstance(right, int):
        match operation:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case _:
                return left * right
    raise _NotUnderstood(ast.unparse(node))


def _range(numbers: list[int]) -> list[int]:
    ids = range(*numbers)
    if len(ids) > MOST_DEVICES:
        raise _NotUnderstood(f"a range of more than {MOST_DEVICES} devices")
    return list(ids)


def _number(node: ast.expr) -> int:
    value = _value(node)
    if not isinstance(value, int):
        raise _NotUnderstood(f"a list where a number belongs ({ast.unparse(node)})")
    return value


def _list(node: ast.expr) -> list[int]:
    value = _value(node)
    if not isinstance(value, list):
        raise _NotUnderstood(f"a number where a list belongs ({ast.unparse(node)})")
    return value
