"""gpt-oss (harmony): ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.

The recipient may also stand before the channel, in the head of the message. Messages for other recipients (the built-in
browser and python) and in other channels hold no call.
"""

from __future__ import annotations

import re

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.channels import Said
from posttrain.data.tool_forms.grammar import CallSyntax, json_of
from posttrain.data.tool_forms.values import call_with_json
from posttrain.registry import TOOL_FORMS

_MESSAGE = re.compile(
    r"(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]*)")


@TOOL_FORMS.register(
    "gpt_oss",
    in_template=("<|channel|>", "to=functions.", "<|call|>"),
    opening=("<|channel|>commentary to=functions.", "<|start|>assistant to=functions.", " to=functions."),
    marks=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    calls_as_messages=True,
    channels=True,
)
def gpt_oss(reply: str, schemas: Schemas) -> list[ToolCall]:
    calls = []
    for message in _MESSAGE.finditer(reply):
        recipient = _RECIPIENT.search(message["head"])
        if recipient is not None:
            calls.append(call_with_json(recipient.group(1), message["body"]))
    return calls


def said(reply: str, *, calls: bool, whole: bool) -> Said:
    """Split a reply: see data.tool_forms.channels."""
    if "<|" not in reply:  # its channel stands in the prompt
        return Said(reply)
    content, reasoning = "", ""
    for message in _MESSAGE.finditer(reply):
        channel = _CHANNEL.search(message["head"])
        if channel is not None and channel.group(1) == "analysis":
            reasoning += message["body"]
        elif not (calls and _RECIPIENT.search(message["head"])):
            content += message["body"]
    return Said(content, reasoning)


# The model ends its turn with a call.
SYNTAX = CallSyntax(
    call=json_of(
        "«<|channel|>»commentary to=functions.{name} «<|constrain|>»json«<|message|>»",
        "«<|call|>»",
    ),
    several=False,
)
