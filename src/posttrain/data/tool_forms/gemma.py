"""Gemma 4: ``<|tool_call>call:NAME{key:value}<tool_call|>``; FunctionGemma: ``<start_function_call>...<end_function_call>``.

Texts stand between ``<|"|>`` (FunctionGemma: ``<escape>``); numbers, true, false and null as in JSON; lists and objects nest,
with bare keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import Schemas
from posttrain.data.tool_forms.grammar import (
    CallSyntax,
    Rules,
    Schema,
    bare_object,
    bounds,
    closed,
    json_value,
    texts,
)
from posttrain.libraries import json_text
from posttrain.libraries.grammars import BadGrammar, literal, marked
from posttrain.registry import TOOL_FORMS

_CALL = re.compile(r"(?:<\|tool_call>|<start_function_call>)(.*?)(?:<tool_call\|>|<end_function_call>|\Z)", re.DOTALL)
_HEAD = re.compile(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", re.DOTALL)
_QUOTED = re.compile(r'(<\|"\|>.*?<\|"\|>|<escape>.*?<escape>|"(?:[^"\\]|\\.)*")', re.DOTALL)
_BARE_KEY = re.compile(r"""([{,]\s*)([^\s{},:\[\]"\\]+)\s*:""")

_WORDS = {"None": "null", "True": "true", "False": "false"}  # as the template writes them in places
_WORD = re.compile(r"(?<=[:,\[])(?:None|True|False)(?=[,\]}])")


@TOOL_FORMS.register(
    "gemma",
    in_template=("_call>call:",),
    opening=("<|tool_call>", "<start_function_call>"),
    marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
)
def gemma(reply: str, schemas: Schemas) -> list[ToolCall]:
    return [_call(text) for text in _CALL.findall(reply)]


def _call(text: str) -> ToolCall:
    head = _HEAD.fullmatch(text)
    if head is None:
        return ToolCall(problem="a tool call is written call:NAME{key:value}")
    try:
        arguments = _object(head.group(2))
    except (ValueError, RecursionError) as error:
        return ToolCall(name=head.group(1), problem=f"the arguments cannot be read: {error}")
    return ToolCall(name=json_text.whole_characters(head.group(1)), arguments=json_text.whole_characters(arguments))


def _object(text: str) -> Any:
    """Read an object with bare keys: texts are set aside, keys are quoted, and the rest is JSON."""
    texts: list[str] = []

    def aside(found: re.Match[str]) -> str:
        quoted = found.group(1)
        for mark in ('<|"|>', "<escape>"):
            if quoted.startswith(mark):
                texts.append(quoted[len(mark) : -len(mark)])
                break
        else:
            texts.append(json.loads(quoted))
        return f'"\\u0000{len(texts) - 1}"'

    bare = _WORD.sub(lambda found: _WORDS[found[0]], _QUOTED.sub(aside, text))
    return _with_texts(json_text.loads(_BARE_KEY.sub(r'\1"\2":', bare)), texts)


def _with_texts(value: Any, texts: list[str]) -> Any:
    if isinstance(value, str):
        return texts[int(value[1:])] if value.startswith("\0") else value
    if isinstance(value, list):
        return [_with_texts(each, texts) for each in value]
    if isinstance(value, dict):
        return {_with_texts(key, texts): _with_texts(each, texts) for key, each in value.items()}
    return value


# The marks of Gemma 4, or of FunctionGemma where the tokenizer has those.
_QUOTE = marked('<|"|>', "<escape>")
_ENDS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<escape>", "<start_function_call>", "<end_function_call>")


def _value(rules: Rules, schema: Schema) -> str:
    """Return an expression for a value. One without a type, or of several, is a text or a plain value."""
    kind, allowed = schema.get("type"), schema.get("enum")
    if isinstance(allowed, list) and allowed and all(isinstance(each, str) for each in allowed):
        return f"{_QUOTE} ({' | '.join(literal(each) for each in allowed)}) {_QUOTE}"
    if kind == "object" and schema.get("properties"):
        bounds(schema, "", "", "properties", "required", "additionalProperties")
        return rules.rule(bare_object(rules, closed(schema), _value))
    if kind == "array":
        item = _value(rules, schema["items"] if isinstance(schema.get("items"), Mapping) else {})
        return f'"[" {_listed(item, **bounds(schema, "minItems", "maxItems", "items"))} "]"'
    if kind in ("integer", "number", "boolean", "null"):
        return json_value(schema)
    if kind not in (None, "string"):
        raise BadGrammar(f"a parameter of type {json.dumps(kind)[:60]} has no grammar in this model's form of calls")
    return f"{_QUOTE} {rules.text(*_ENDS, **bounds(schema, 'minLength', 'maxLength'))} {_QUOTE}"


def _listed(item: str, *, least: int, most: int | None) -> str:
    """Return an expression for items with commas between them."""
    if most == 0:
        return '""'
    more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return f"{item} {more}" if least else f"({item} {more})?"


def _written(rules: Rules, name: str, schema: Schema) -> str:
    begin, end = marked("<|tool_call>", "<start_function_call>"), marked("<tool_call|>", "<end_function_call>")
    return f"{begin} {texts(f'call:{name}')} {bare_object(rules, schema, _value)} {end}"


SYNTAX = CallSyntax(call=_written)
