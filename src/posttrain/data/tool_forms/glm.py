"""GLM 4.5 to 4.7: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>``."""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, tagged, texts
from posttrain.data.tool_forms.values import after_thoughts, typed, without_line_ends
from posttrain.libraries import json_text
from posttrain.registry import TOOL_FORMS

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


@TOOL_FORMS.register(
    "glm",
    in_template=("<tool_call>", "<arg_key>", "<arg_value>"),
    opening=("<tool_call>",),
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
def glm(reply: str, schemas: Schemas) -> list[ToolCall]:
    return [_call(text, schemas) for text in _CALL.findall(after_thoughts(reply))]


def _call(text: str, schemas: Schemas) -> ToolCall:
    name, found, rest = text.partition("<arg_key>")
    name = name.strip()
    if not re.fullmatch(r"[^\s<>{}]+", name):
        return ToolCall(
            problem="a tool call begins with the function's name, then <arg_key>KEY</arg_key><arg_value>..."
        )
    if left := _ARGUMENT.sub("", found + rest).strip():
        problem = f"arguments are written <arg_key>KEY</arg_key><arg_value>value</arg_value>; {left[:40]!r} is not"
        return ToolCall(name=name, problem=problem)
    schema = schemas.get(name, {})
    pairs = [(key.strip(), without_line_ends(value)) for key, value in _ARGUMENT.findall(found + rest)]
    arguments = {key: typed(value, key, schema) for key, value in pairs}
    return ToolCall(name=json_text.whole_characters(name), arguments=json_text.whole_characters(arguments))


SYNTAX = CallSyntax(
    call=tagged(
        ("«<tool_call>»{name}\n", "«</tool_call>»"),
        ("«<arg_key>»{name}«</arg_key>»\n«<arg_value>»", "«</arg_value>»\n"),
        ends=("</arg_value>", "</tool_call>", "</think>"),
    ),
    between=texts("\n"),
)
