"""``response_format`` and ``tool_choice`` of a request: the grammar that its answers are kept within."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.data.chat_api import must_call, tools_of
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.tool_forms import DEFAULT, calls_grammar_of
from posttrain.errors import MissingDependency
from posttrain.libraries.grammars import BadGrammar, json_grammar

_TEXT = {"type": "text"}
_ASKED = 'use {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}'


def grammar_of(body: Mapping[str, Any], honours: Honours, form: str = DEFAULT) -> tuple[str, str]:
    """Return the grammar of a request ("" for any text), and what is wrong with it ("" for nothing).

    Args: body, of which the tools have no problems; form, in which the model writes tool calls.
    """
    asked, forced = body.get("response_format"), must_call(body)
    if asked in (None, _TEXT):
        return _calls_grammar(body, forced, honours, form) if forced else ("", "")
    shown = f"response_format is {json.dumps(asked)[:60]}"
    if not isinstance(asked, Mapping) or asked.get("type") not in ("json_object", "json_schema"):
        return "", f"{shown}; {_ASKED}"
    if not honours.grammars:
        return "", f"{shown}, which {honours.no_grammars}"
    if tools_of(body):
        return "", f"{shown}, and tools are offered, whose calls it would exclude; leave one of them out"
    schema = None
    if asked["type"] == "json_schema":
        named = asked.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            return "", f"{shown} without a schema; {_ASKED}"
    return _made(lambda: json_grammar(schema), "response_format")


def _calls_grammar(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], honours: Honours, form: str
) -> tuple[str, str]:
    """Return the grammar of answers that call one of the tools, and what is wrong."""
    choice = body["tool_choice"]
    if not honours.grammars:
        return "", f"tool_choice is {json.dumps(choice)[:60]}, which {honours.no_grammars}"
    several = choice == "required" and body.get("parallel_tool_calls") is not False
    return _made(lambda: calls_grammar_of(form, tools, several=several), "tool_choice and the tools")


def _made(grammar: Callable[[], str], what: str) -> tuple[str, str]:
    try:
        return grammar(), ""
    except BadGrammar as error:
        return "", f"no grammar can be made of {what}: {error}"
    except MissingDependency as error:
        return "", str(error)
