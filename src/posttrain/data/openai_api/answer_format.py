"""``response_format`` of a request: the grammar that its answers are kept within."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posttrain.data.chat_api import tools_of
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.errors import MissingDependency
from posttrain.libraries.grammars import BadGrammar, json_grammar

_TEXT = {"type": "text"}
_ASKED = 'use {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}'


def grammar_of(body: Mapping[str, Any], honours: Honours) -> tuple[str, str]:
    """Return the grammar of a request ("" for any text), and what is wrong with it ("" for nothing)."""
    asked = body.get("response_format")
    if asked in (None, _TEXT):
        return "", ""
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
    try:
        return json_grammar(schema), ""
    except BadGrammar as error:
        return "", f"no grammar can be made of response_format: {error}"
    except MissingDependency as error:
        return "", str(error)
