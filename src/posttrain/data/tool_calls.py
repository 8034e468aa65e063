"""Tool calls of a model, and their validation against the tool's schema.

``data.tool_forms`` parses them, a file per form. The text of a call is data: it is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    call_id: str = ""  # the id that the model wrote, in forms that have one


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
