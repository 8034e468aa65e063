"""MiniMax M2: ``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>``."""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, tagged, texts
from posttrain.data.tool_forms.invocations import invoked
from posttrain.data.tool_forms.values import after_thoughts
from posttrain.registry import TOOL_FORMS

_BLOCK = re.compile(r"<minimax:tool_call>(.*?)(?:</minimax:tool_call>|\Z)", re.DOTALL)


@TOOL_FORMS.register(
    "minimax",
    in_template=("<minimax:tool_call>", "<invoke name="),
    opening=("<minimax:tool_call>",),
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
def minimax(reply: str, schemas: Schemas) -> list[ToolCall]:
    blocks = _BLOCK.findall(after_thoughts(reply))
    return [call for block in blocks for call in invoked(block, schemas, mark="")]


SYNTAX = CallSyntax(
    call=tagged(
        ('<invoke name="{name}">\n', "</invoke>\n"),
        ('<parameter name="{name}">', "</parameter>\n"),
        ends=("</parameter>", "</invoke>", "</minimax:tool_call>", "</think>"),
    ),
    before=texts("«<minimax:tool_call>»\n"),
    after=texts("«</minimax:tool_call>»"),
)
