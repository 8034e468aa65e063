"""Kimi K2 and K2.5: ``<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>``."""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, Rules, Schema, json_value, texts
from posttrain.data.tool_forms.values import after_thoughts, call_with_json
from posttrain.registry import TOOL_FORMS

_CALL = re.compile(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|<\|tool_calls?_section_end\|>|\Z)", re.DOTALL)
_NAME = re.compile(r"(?:functions\.)?([^:\s]+)(?::\d+)?")


@TOOL_FORMS.register(
    "kimi",
    in_template=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    opening=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    marks=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_section_begin|>",  # as some answers have it
        "<|tool_call_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
def kimi(reply: str, schemas: Schemas) -> list[ToolCall]:
    return [_call(text) for text in _CALL.findall(after_thoughts(reply))]


def _call(text: str) -> ToolCall:
    named, found, arguments = text.partition("<|tool_call_argument_begin|>")
    call_id = named.strip()
    name = _NAME.fullmatch(call_id)
    if not found or name is None:
        return ToolCall(problem="a tool call is written functions.NAME:0<|tool_call_argument_begin|>{...}")
    return call_with_json(name.group(1), arguments, call_id=call_id)


def _written(rules: Rules, name: str, schema: Schema) -> str:
    begin, number = texts(f"«<|tool_call_begin|>»functions.{name}:"), "/[0-9]{1,3}/"
    end = texts("«<|tool_call_end|>»")
    return f"{begin} {number} {texts('«<|tool_call_argument_begin|>»')} {json_value(schema)} {end}"


SYNTAX = CallSyntax(
    call=_written, before=texts("«<|tool_calls_section_begin|>»"), after=texts("«<|tool_calls_section_end|>»")
)
