"""Numbers that a script lets a program compute: ``python -c "print(3 * 8)"``, ``bc`` and ``awk "BEGIN {print 3 * 8}"``.

Expressions are parsed and computed over numbers alone; nothing is run.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

_MOST = 10**30  # larger numbers are not computed
_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "min": min,
    "max": max,
    "abs": abs,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}


class _Other(Exception):
    """The expression holds something else than numbers."""


def calculated(program: str) -> str | None:
    """The output of a Python program that prints one number; None for another program."""
    try:
        body = ast.parse(program.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if body and isinstance(body[0], ast.Import) and [each.name for each in body[0].names] == ["math"]:
        body = body[1:]
    match body:
        case [ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[one], keywords=[]))]:
            number = _number(one)
            return None if number is None else f"{number}\n"
    return None


def in_awk(program: str) -> str | None:
    """The output of ``BEGIN {print A}`` and of ``BEGIN {printf "%d", A}``, or ``%.2f``; None for another program."""
    found = re.fullmatch(
        r"""\s*BEGIN\s*\{\s*(?:print\b|printf\s*\(?\s*"(%d|%\.\df)(\\n)?"\s*,)\s*(.+?)\)?\s*;?\s*\}\s*""", program
    )
    if found is None or found[3].count("(") < found[3].count(")"):
        return None
    form, end, written = found.groups()
    if written.count("(") > written.count(")"):
        written += ")"
    number = _computed(written)
    if number is None:
        return None
    if form is None:
        return f"{number:.6g}\n" if number != int(number) else f"{int(number)}\n"
    return (form % number) + ("\n" if end else "")


def in_bc(program: str, *, library: bool) -> str | None:
    """The output of ``bc`` for one expression: comparisons, and numbers whose digits do not depend on its scale.

    Args: ``library`` is its ``-l``, with which a quotient has 20 digits; that is computed where it is whole.
    """
    written = program.strip()
    scale = re.match(r"scale\s*=\s*(\d+)\s*;\s*", written)
    written = written[scale.end() :] if scale else written
    digits = int(scale[1]) if scale else 20 if library else 0
    if not re.fullmatch(r"[\d.+\-*/()\s<>=!]+", written):
        return None
    if re.search(r"[<>]|[=!]=", written):
        number = _computed(written)
        return None if number is None else f"{int(number)}\n"
    if "." in written:
        return None
    if "/" not in written:
        number = _computed(written)
        return None if number is None else f"{number}\n"
    exact = _computed(written if digits else written.replace("/", "//"))
    if exact is None or (digits and exact != int(exact)) or (not digits and "-" in written):
        return None
    return f"{int(exact)}.{'0' * digits}\n" if digits else f"{exact}\n"


def _computed(written: str) -> Any:
    try:
        return _number(ast.parse(written.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> Any:
    try:
        value = _value(node)
    except (_Other, ArithmeticError, TypeError, ValueError):
        return None
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _TWO:
            one, other = _value(left), _value(right)
            if isinstance(sign, ast.Pow) and (abs(other) > 64 or abs(one) > 1e6):
                raise _Other
            return _bounded(_TWO[type(sign)](one, other))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            if type(sign) in _COMPARE:
                return _COMPARE[type(sign)](_value(left), _value(right))
        case ast.Call(func=called, args=given, keywords=[]) if ast.unparse(called) in _CALLS:
            return _bounded(_CALLS[ast.unparse(called)](*map(_value, given)))
    raise _Other


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or abs(value) > _MOST:
        raise _Other
    return value
