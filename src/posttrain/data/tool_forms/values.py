"""Parts that several forms share: arguments as JSON, and values written as plain text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from posttrain.data.tool_calls import ToolCall
from posttrain.libraries import json_text

_LONGEST_LITERAL = 100_000  # characters


def call_with_json(name: str, arguments: str, *, call_id: str = "") -> ToolCall:
    """Build a call whose arguments are a JSON object."""
    if not name:
        return ToolCall(problem="the tool call names no function", call_id=call_id)
    try:
        found = json_text.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, problem=f"the arguments are not JSON: {error}", call_id=call_id)
    if not isinstance(found, dict):
        problem = "the arguments must be an object, with the parameters by name"
        return ToolCall(name=name, problem=problem, call_id=call_id)
    name = json_text.whole_characters(name)
    return ToolCall(name=name, arguments=json_text.whole_characters(found), call_id=call_id)


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Convert a value that was written as plain text to the type that the tool's schema gives the parameter ``name``.

    A text stays as it is, and so does a value that is not of its type: the check against the schema reports it.
    """
    kinds = kinds_of(schema, name)
    if kinds == ["string"]:
        return text
    stripped = text.strip()
    word = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(stripped.lower(), stripped)
    try:
        value = json_text.loads(word)
    except (ValueError, RecursionError):
        value = _as_python_writes_it(stripped, text)
    return text if isinstance(value, str) or ("string" in kinds and not _fits(value, kinds)) else value


def _as_python_writes_it(text: str, otherwise: str) -> Any:
    """Return a list or an object that is written as a Python literal, as Seed's template writes it."""
    if not text.startswith(("[", "{")) or len(text) > _LONGEST_LITERAL:
        return otherwise
    try:
        value = ast.literal_eval(text)  # reads literals alone: nothing is evaluated
        return value if json_text.loads(json.dumps(value)) == value else otherwise
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return otherwise


def kinds_of(schema: object, name: str) -> list[str]:
    """Return the types of a parameter: text where the schema, which a client may have written, gives none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    parameter = properties.get(name) if isinstance(properties, Mapping) else None
    kind = parameter.get("type") if isinstance(parameter, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    return [each for each in kinds if isinstance(each, str)] or ["string"]


def _fits(value: object, kinds: list[str]) -> bool:
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    if isinstance(value, float):
        return "number" in kinds
    return ("array" if isinstance(value, list) else "object") in kinds


def without_line_ends(text: str) -> str:
    """Remove the line break that a template writes on either side of a value; further ones belong to the value."""
    return text.removeprefix("\n").removesuffix("\n")


def after_thoughts(reply: str) -> str:
    """Return what follows the thoughts: calls in them are not meant to be run."""
    return reply.rpartition("</think>")[2]
