"""Kimi K3: tags whose names are plain text between the special tokens ``<|open|>``, ``<|close|>`` and ``<|sep|>``.

``<|open|>call tool="NAME" index="1"<|sep|>`` holds for each argument
``<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>``: a text as it is, anything else as JSON.
``<|open|>json type="object"<|sep|>{...}`` holds all of them at once.
"""

from __future__ import annotations

import html
import re
from typing import Any

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.channels import Said
from posttrain.data.tool_forms.grammar import CallSyntax, tagged, texts
from posttrain.data.tool_forms.values import call_with_json
from posttrain.libraries import json_text
from posttrain.registry import TOOL_FORMS

_TAG = r"<\|open\|>{name}((?:\s[^<]*)?)<\|sep\|>(.*?)(?:<\|close\|>{name}<\|sep\|>|\Z)"
_TOOLS = re.compile(_TAG.format(name="tools"), re.DOTALL)
_CALL = re.compile(_TAG.format(name="call"), re.DOTALL)
_ARGUMENT = re.compile(_TAG.format(name="argument"), re.DOTALL)
_JSON = re.compile(_TAG.format(name="json"), re.DOTALL)
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_AFTER_THOUGHTS = "<|close|>think<|sep|>"
_THOUGHTS, _TOOLS_BEGIN = "<|open|>think<|sep|>", "<|open|>tools"
_TAGS = re.compile(r"<\|(?:open|close)\|>[^<]*(?:<\|sep\|>|\Z)")
_FORM = '<|open|>call tool="NAME" index="1"<|sep|> ... <|close|>call<|sep|>'


@TOOL_FORMS.register(
    "kimi_k3",
    in_template=("<|open|>", "<|close|>", "<|sep|>"),
    opening=("<|close|>response<|sep|><|open|>tools<|sep|>", "<|open|>tools<|sep|>"),
    marks=("<|open|>", "<|close|>", "<|sep|>"),
    channels=True,
)
def kimi_k3(reply: str, schemas: Schemas) -> list[ToolCall]:
    answer = reply.rpartition(_AFTER_THOUGHTS)[2]
    return [call for _, block in _TOOLS.findall(answer) for call in _calls(block)]


def said(reply: str, *, calls: bool, whole: bool) -> Said:
    """Split a reply: see data.tool_forms.channels. Its first part may have been opened by the prompt."""
    thoughts, closed, answer = reply.rpartition(_AFTER_THOUGHTS)
    if not closed and reply.startswith(_THOUGHTS):
        return Said("", reply.removeprefix(_THOUGHTS))
    if not (closed or whole or reply.startswith("<|open|>") or "<|close|>response" in reply):
        return Said("")
    answer = _TOOLS.sub("" if calls else r"\2", answer)
    answer = answer[: answer.find(_TOOLS_BEGIN)] if calls and _TOOLS_BEGIN in answer else answer
    return Said(_TAGS.sub("", answer), thoughts.removeprefix(_THOUGHTS))


def _calls(block: str) -> list[ToolCall]:
    calls = _CALL.findall(block)
    return [_call(*call) for call in calls] or [ToolCall(problem=f"a tool call is written {_FORM}")]


def _call(head: str, body: str) -> ToolCall:
    name = _attributes(head).get("tool", "")
    if not name:
        return ToolCall(problem=f"the tool call names no function; it is written {_FORM}")
    if whole := _JSON.fullmatch(body.strip()):
        return call_with_json(name, whole.group(2))
    if rest := _ARGUMENT.sub("", body).strip():
        form = '<|open|>argument key="KEY" type="string"<|sep|>value<|close|>argument<|sep|>'
        return ToolCall(name=name, problem=f"arguments are written {form}, and {rest[:40]!r} is outside of them")
    arguments: dict[str, Any] = {}
    for written, text in _ARGUMENT.findall(body):
        attributes = _attributes(written)
        if not (key := attributes.get("key", "")):
            return ToolCall(name=name, problem="an argument has no key")
        if attributes.get("type", "string") == "string":
            arguments[key] = text
            continue
        try:
            arguments[key] = json_text.loads(text)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, problem=f"the argument {key!r} is not JSON: {error}")
    return ToolCall(name=json_text.whole_characters(name), arguments=json_text.whole_characters(arguments))


def _attributes(head: str) -> dict[str, str]:
    return {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(head)}


SYNTAX = CallSyntax(
    call=tagged(
        ('«<|open|>»call tool="{name}" index="1"«<|sep|>»', "«<|close|>»call«<|sep|>»"),
        ('«<|open|>»argument key="{name}" type="{type}"«<|sep|>»', "«<|close|>»argument«<|sep|>»"),
        ends=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    # Inside of a response, or where the chat template has begun none.
    before=f"({texts('«<|close|>»response«<|sep|>»')})? {texts('«<|open|>»tools«<|sep|>»')}",
    after=texts("«<|close|>»tools«<|sep|>»"),
)
