"""Calls written as ``<invoke name="NAME">`` with a ``<parameter name="KEY">`` per argument; DeepSeek marks each tag."""

from __future__ import annotations

import re
from typing import Any

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.values import typed, without_line_ends
from posttrain.libraries import json_text


def invoked(block: str, schemas: Schemas, *, mark: str) -> list[ToolCall]:
    """Parse the calls of a block. ``mark``: what stands in every tag before its name."""
    tag = re.escape(mark)
    calls = re.findall(rf"<{tag}invoke name=\"?([^\">\n]*)\"?\s*>(.*?)(?:</{tag}invoke>|\Z)", block, flags=re.DOTALL)
    if not calls:
        return [ToolCall(problem=f'a tool call is written <{mark}invoke name="..."> ... </{mark}invoke>')]
    parameter = re.compile(
        rf"<{tag}parameter name=\"?([^\">\n]*)\"?(?: string=\"(true|false)\")?\s*>(.*?)(?:</{tag}parameter>|\Z)",
        re.DOTALL,
    )
    return [_call(name.strip(), body, parameter, schemas, mark) for name, body in calls]


def _call(name: str, body: str, parameter: re.Pattern[str], schemas: Schemas, mark: str) -> ToolCall:
    if not name:
        return ToolCall(problem="the tool call names no function")
    if rest := parameter.sub("", body).strip():
        form = f'<{mark}parameter name="...">value</{mark}parameter>'
        return ToolCall(name=name, problem=f"parameters are written {form}, and {rest[:40]!r} is outside of them")
    arguments: dict[str, Any] = {}
    for key, is_text, value in parameter.findall(body):
        if is_text == "false":
            try:
                arguments[key] = json_text.loads(value)
            except (ValueError, RecursionError) as error:
                return ToolCall(name=name, problem=f"the argument {key!r} is not JSON: {error}")
        elif is_text == "true":
            arguments[key] = value
        else:
            arguments[key] = typed(without_line_ends(value), key, schemas.get(name, {}))
    return ToolCall(name=json_text.whole_characters(name), arguments=json_text.whole_characters(arguments))
