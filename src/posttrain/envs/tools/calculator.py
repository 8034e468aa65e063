"""A calculator for arithmetic expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from posttrain.interfaces.tool import KEEPS_NOTHING, Tool, ToolFailed, parameters
from posttrain.registry import TOOLS
from posttrain.rewards.expression import Expression, NoValue


@TOOLS.register("calculator")
def calculator() -> Tool:
    """A tool that evaluates an expression, to 12 digits."""
    return Tool(
        name="calculator",
        description="The value of an arithmetic expression with + - * / ^, brackets, sqrt, ln, log, exp, sin, cos, tan and pi.",
        parameters=parameters(expression=("string", "such as (17 + 5) * 3 / 4")),
        run=_value,
        **KEEPS_NOTHING,
    )


def _value(arguments: Mapping[str, Any]) -> str:
    text = str(arguments["expression"])
    # The grammar expects LaTeX commands, such as \sqrt.
    for word in ("sqrt", "ln", "log", "exp", "sin", "cos", "tan", "pi"):
        text = text.replace(word, f"\\{word}").replace(f"\\\\{word}", f"\\{word}")
    try:
        expression = Expression(text)
        if letters := expression.variables - {"π"}:
            raise NoValue(f"unexpected {min(letters)!r}")
        value = expression.at({"π": math.pi})
    except NoValue as error:
        raise ToolFailed(f"the expression has no value: {error}") from None
    if abs(value.imag) > 1e-12 * max(abs(value), 1.0):
        raise ToolFailed("the expression has no real value")
    return f"{value.real:.12g}"
