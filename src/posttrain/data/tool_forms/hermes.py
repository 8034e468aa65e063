"""Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once per call."""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, json_of, texts
from posttrain.libraries import json_text
from posttrain.registry import TOOL_FORMS

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@TOOL_FORMS.register(
    "hermes", in_template=("<tool_call>",), opening=("<tool_call>",), marks=("<tool_call>", "</tool_call>")
)
def hermes(reply: str, schemas: Schemas) -> list[ToolCall]:
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


_BEGIN, _END = '«<tool_call>»\n{"name": "{name}", "arguments": ', "}\n«</tool_call>»"
SYNTAX = CallSyntax(call=json_of(_BEGIN, _END), between=texts("\n"))
