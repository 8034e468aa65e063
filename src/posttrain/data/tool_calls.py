"""Parsing of tool calls in model output, and validation against the tool's schema.

The form is that of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once per call. The
text between the tags is data: it is parsed as JSON and never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.libraries import json_text

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or its ``problem``, a sentence that the model can read."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def tool_calls(reply: str) -> list[ToolCall]:
    """Parse all calls of a reply, in order; a malformed one gets its problem."""
    return [_call(text) for text in _CALL.findall(reply)]


def _call(text: str) -> ToolCall:
    try:
        call = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the tool call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='a tool call is written {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON in a text
        try:
            arguments = json_text.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=call["name"], problem=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], problem="the arguments must be an object, with the parameters by name")
    return ToolCall(name=json_text.whole_characters(call["name"]), arguments=json_text.whole_characters(arguments))


def argument_problem(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Describe the problem of a call's arguments in a sentence; "" without one. Checks names, and types of the first level."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if schema.get("additionalProperties", False):
                continue
            known = ", ".join(properties) or "none"
            return f"there is no argument {name!r} (known: {known})"
        kinds = properties[name].get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"the argument {name!r} must be of type {' or '.join(kinds)}, not {json.dumps(value)[:60]}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))
