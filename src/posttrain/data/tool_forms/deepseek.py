"""DeepSeek V3, R1, V3.1 and V3.2.

V3 and R1 write ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and the arguments in a fenced block of JSON; V3.1 writes
``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}``; V3.2 writes ``<｜DSML｜invoke name="NAME">`` with a tag per parameter.
"""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import CallSyntax, json_of, texts
from posttrain.data.tool_forms.invocations import invoked
from posttrain.data.tool_forms.values import after_thoughts, call_with_json
from posttrain.registry import TOOL_FORMS

_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
_BLOCK = re.compile(r"<｜DSML｜function_calls>(.*?)(?:</｜DSML｜function_calls>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\s*([^\n]*?)\s*\n```(?:json)?\s*\n(.*?)(?:\n?```\s*|\Z)\Z", re.DOTALL)


@TOOL_FORMS.register(
    "deepseek",
    in_template=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    opening=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜function_calls>"),
    marks=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "｜DSML｜",
    ),
)
def deepseek(reply: str, schemas: Schemas) -> list[ToolCall]:
    answer = after_thoughts(reply)
    marked = [call for block in _BLOCK.findall(answer) for call in invoked(block, schemas, mark="｜DSML｜")]
    return [_call(text) for text in _CALL.findall(answer)] + marked


def _call(text: str) -> ToolCall:
    before, separated, after = text.partition("<｜tool▁sep｜>")
    if not separated:
        return ToolCall(problem="a tool call has <｜tool▁sep｜> between its name and its arguments")
    fenced = _FENCED.match(after)
    if before.strip() == "function" and fenced:
        return call_with_json(fenced.group(1), fenced.group(2))
    if before.strip() == "function" and "```" not in after and not after.lstrip().startswith("{"):
        return ToolCall(name=after.strip()[:60], problem="the arguments stand in a block of ```json behind the name")
    return call_with_json(before.strip(), after)


# As V3.1 writes them.
SYNTAX = CallSyntax(
    call=json_of("«<｜tool▁call▁begin｜>»{name}«<｜tool▁sep｜>»", "«<｜tool▁call▁end｜>»"),
    before=texts("«<｜tool▁calls▁begin｜>»"),
    after=texts("«<｜tool▁calls▁end｜>»"),
)
