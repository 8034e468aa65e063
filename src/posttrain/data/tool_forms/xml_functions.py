"""Calls written as ``<function=NAME>`` with a ``<parameter=NAME>`` per argument, in the tags of a family."""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.values import after_thoughts, typed, without_line_ends
from posttrain.libraries import json_text

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def function_calls(reply: str, schemas: Schemas, *, opening: str, closing: str) -> list[ToolCall]:
    """Parse the calls between ``opening`` and ``closing``, which may hold several functions each."""
    blocks = re.findall(
        f"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\\Z)", after_thoughts(reply), flags=re.DOTALL
    )
    return [call for block in blocks for call in _calls(block, schemas)]


def _calls(block: str, schemas: Schemas) -> list[ToolCall]:
    functions = _FUNCTION.findall(block)
    if not functions:
        return [ToolCall(problem="a tool call is written <function=NAME> ... </function>")]
    return [_call(name.strip(), body, schemas) for name, body in functions]


def _call(name: str, body: str, schemas: Schemas) -> ToolCall:
    if not name:
        return ToolCall(problem="the tool call names no function")
    rest = _PARAMETER.sub("", body).strip()
    if rest:
        shown = rest[:40]
        problem = f"parameters are written <parameter=NAME>value</parameter>, and {shown!r} is outside of them"
        return ToolCall(name=name, problem=problem)
    schema = schemas.get(name, {})
    found = {key.strip(): without_line_ends(value) for key, value in _PARAMETER.findall(body)}
    arguments = {key: typed(value, key, schema) for key, value in found.items()}
    return ToolCall(name=json_text.whole_characters(name), arguments=json_text.whole_characters(arguments))
