"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""

from __future__ import annotations

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, tagged, texts
from posttrain.data.tool_forms.xml_functions import function_calls
from posttrain.registry import TOOL_FORMS


@TOOL_FORMS.register(
    "qwen3_coder",
    in_template=("<tool_call>", "<function=", "<parameter="),
    opening=("<tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
)
def qwen3_coder(reply: str, schemas: Schemas) -> list[ToolCall]:
    return function_calls(reply, schemas, opening="<tool_call>", closing="</tool_call>")


SYNTAX = CallSyntax(
    call=tagged(
        ("«<tool_call>»\n<function={name}>\n", "</function>\n«</tool_call>»"),
        ("<parameter={name}>\n", "\n</parameter>\n"),
        ends=("</parameter>", "<parameter=", "</function>", "</tool_call>", "</think>"),
    ),
    between=texts("\n"),
)
