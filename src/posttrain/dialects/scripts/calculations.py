"""Numbers that a script lets a program compute: ``python -c "print(3 * 8)"``, a short program behind ``python - 3 8 <<EOF``,
``bc`` and ``awk "BEGIN {print 3 * 8}"``.

Programs are parsed and computed over numbers alone; nothing is run.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

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
    "math.log": math.log,
    "math.exp": math.exp,
    "math.cos": math.cos,
    "math.sin": math.sin,
}


class _Other(Exception):
    """The expression holds something else than numbers."""


def calculated(program: str, arguments: Sequence[str] = ()) -> str | None:
    """The output of a Python program that prints one number, by assignments and conditions; None for another program.

    Args: ``arguments`` are ``sys.argv[1]``, ``sys.argv[2]`` ...
    """
    try:
        body = ast.parse(textwrap.dedent(program).strip()).body
        names: dict[str, Any] = {f"sys.argv[{place}]": word for place, word in enumerate(arguments, start=1)}
        return _printed(body, names)
    except (_Other, SyntaxError, RecursionError, MemoryError, ArithmeticError, TypeError, ValueError):
        return None


def _printed(body: Sequence[ast.stmt], names: dict[str, Any]) -> str | None:
    """Follow statements. Returns: the output of the last one, where that prints; None without one. Raises: _Other."""
    for place, node in enumerate(body):
        match node:
            case ast.Import(names=modules) if all(each.name in ("math", "sys") and not each.asname for each in modules):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = _value(value, names)
            case ast.If(test=test, body=then, orelse=otherwise):
                if (said := _printed(then if _value(test, names) else otherwise, names)) is not None:
                    return said if place == len(body) - 1 else _refuse()
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[one], keywords=[])) if place == len(body) - 1:
                return f"{_value(one, names)}\n"
            case _:
                _refuse()
    return None


def _refuse() -> NoReturn:
    raise _Other


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
        value = _value(node, {})
    except (_Other, ArithmeticError, TypeError, ValueError):
        return None
    return value


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name() | ast.Subscript() if ast.unparse(node) in names:
            return names[ast.unparse(node)]
        case ast.Attribute() if ast.unparse(node) == "math.pi":
            return math.pi
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _TWO:
            one, other = _of_numbers(_value(left, names)), _of_numbers(_value(right, names))
            if isinstance(sign, ast.Pow) and (abs(other) > 64 or abs(one) > 1e6):
                raise _Other
            return _bounded(_TWO[type(sign)](one, other))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            if type(sign) in _COMPARE:
                return _COMPARE[type(sign)](_value(left, names), _value(right, names))
        case ast.IfExp(test=test, body=then, orelse=otherwise):
            return _value(then if _value(test, names) else otherwise, names)
        case ast.Call(func=ast.Name(id="int" | "float" as name), args=[ast.Constant(value=str() as text)], keywords=[]):
            return _bounded(_CALLS[name](text))
        case ast.Call(func=called, args=given, keywords=[]) if ast.unparse(called) in _CALLS:
            return _bounded(_CALLS[ast.unparse(called)](*(_value(each, names) for each in given)))
        case ast.JoinedStr(values=[ast.FormattedValue(value=inner, conversion=-1, format_spec=form)]):
            return format(_of_numbers(_value(inner, names)), _form(form))
    raise _Other


def _of_numbers(value: Any) -> Any:
    """The value, which an argument's text is not. Raises: _Other."""
    if isinstance(value, str):
        raise _Other
    return value


def _form(node: ast.expr | None) -> str:
    """The format of a number in an f-string: digits behind the point alone. Raises: _Other."""
    match node:
        case None:
            return ""
        case ast.JoinedStr(values=[ast.Constant(value=str() as form)]) if re.fullmatch(r"(?:\.\d)?[dfeg]?", form):
            return form
    raise _Other


def _bounded(value: Any) -> Any:
    if isinstance(value, complex | str) or abs(value) > _MOST:
        raise _Other
    return value
