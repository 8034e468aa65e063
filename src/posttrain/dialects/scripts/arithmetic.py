"""Integer arithmetic of the shell, ``$((2 * N))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from posttrain.dialects.scripts.state import Shell

WIDTH = 64  # bits of the shell's integers
_TWO: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def arithmetic(shell: Shell, text: str, line: int) -> str:
    """Compute an expression over integers and variables. Returns: the number, or a hole."""
    number = computed(shell, text)
    if number is not None:
        return str(number)
    unset = [name for name in _names(text) if name not in shell.variables]
    if unset:
        return shell.hole(f"${unset[0]} of line {line} is not set", f"export {unset[0]}=..., or set it in the script")
    return shell.hole(f"$(({text.strip()})) of line {line} cannot be computed", "write its value into the script")


def computed(shell: Shell, text: str) -> int | None:
    """The value of an expression; None where a part is unknown."""
    plain = re.sub(r"\$\{?(#|\w+)\}?", lambda found: _number(shell, found[1]) or "?", text)
    plain = re.sub(r"\b[A-Za-z_]\w*", lambda found: _number(shell, found[0]) or "?", plain)
    plain = plain.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    try:
        return _evaluate(ast.parse(re.sub(r"!(?!=)", " not ", plain).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _names(text: str) -> list[str]:
    return re.findall(r"\b[A-Za-z_]\w*", text)


def _number(shell: Shell, name: str) -> str | None:
    if name == "#":
        return str(len(shell.positional))
    if name.isdigit():
        place = int(name)
        value = shell.positional[place - 1] if 0 < place <= len(shell.positional) else name
    else:
        given = shell.variables.get(name)
        value = given if isinstance(given, str) else ""
    return value if re.fullmatch(r"-?\d+", value) else None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return int(not _evaluate(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow | ast.LShift) and not 0 <= other < WIDTH:
                raise ValueError("a power that no integer of the shell holds")
            return (int(_TWO[type(op)](one, other)) + 2 ** (WIDTH - 1)) % 2**WIDTH - 2 ** (WIDTH - 1)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(_COMPARE[type(op)](_evaluate(left), _evaluate(right)))
        case ast.BoolOp(op=op, values=values):
            results = [_evaluate(value) for value in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body) if _evaluate(test) else _evaluate(orelse)
    raise ValueError("an expression of another kind")
