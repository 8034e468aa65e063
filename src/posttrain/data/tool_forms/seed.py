"""Seed-OSS: ``<seed:tool_call><function=NAME><parameter=KEY>value</parameter></function></seed:tool_call>``."""

from __future__ import annotations

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, tagged, texts
from posttrain.data.tool_forms.xml_functions import function_calls
from posttrain.registry import TOOL_FORMS


@TOOL_FORMS.register(
    "seed",
    in_template=("<seed:tool_call>", "<function="),
    opening=("<seed:tool_call>",),
    marks=("<seed:tool_call>", "</seed:tool_call>"),
)
def seed(reply: str, schemas: Schemas) -> list[ToolCall]:
    answer = reply.rpartition("</seed:think>")[2]
    return function_calls(answer, schemas, opening="<seed:tool_call>", closing="</seed:tool_call>")


SYNTAX = CallSyntax(
    call=tagged(
        ("«<seed:tool_call>»\n<function={name}>\n", "</function>\n«</seed:tool_call>»"),
        ("<parameter={name}>", "</parameter>\n"),
        ends=("</parameter>", "<parameter=", "</function>", "</seed:tool_call>", "</think>", "</seed:think>"),
    ),
    between=texts("\n"),
)
