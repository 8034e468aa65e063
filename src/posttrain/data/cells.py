"""Cells of a row: chat messages, texts, nested values; an invalid one is reported where its row is known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from posttrain.data.columns import root
from posttrain.data.record_files import Record, described
from posttrain.errors import Problem, did_you_mean
from posttrain.libraries import json_text

ROLES = ("system", "developer", "user", "assistant", "tool")
# Of ShareGPT's messages; other names are roles
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Of a chat message written as text, as JSON or as Python prints it
_NAMED_ROLE = re.compile(r"""["'](role|from)["']\s*:""")

Message = dict[str, Any]  # role, content, and further keys of the chat template (tool_calls, name, ...)


class BadCell(Exception):
    """A cell is invalid; caught where the row is known."""


def missing_column(column: str, record: Record, place: str, field: str) -> Problem:
    what = f"{place} has no column {root(column)} (it has {', '.join(record)})"
    return Problem(what, fix=did_you_mean(root(column), list(record), listed=True), field=f"data.{field}")


def messages_of(value: Any, *, typed: bool = False) -> list[Message]:
    """Return checked chat messages. With ``typed`` a content may also be a list of parts, which the caller checks."""
    if not isinstance(value, list):
        raise BadCell(f"holds {described(value)}; a list of chat messages is expected")
    if not value:
        raise BadCell("holds a list of 0 messages; at least one is expected")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise BadCell(f"holds {described(message)} as message {index}; a mapping with role and content is expected")
        message = _standard(without_none(message))
        role = message.get("role")
        if role not in ROLES:
            known = f"one of {', '.join(ROLES)} is expected"
            shown = f"holds {described(role)} as role of message {index}" if "role" in message else ""
            raise BadCell(f"{shown or f'has no role in message {index}'}; {known}")
        if role in ("system", "developer") and index:
            raise BadCell(f"holds a {role} message in place {index}; it can only be the first")
        content = message.get("content")
        fits = isinstance(content, str) or (typed and isinstance(content, list) and bool(content))
        if not fits and not (role == "assistant" and message.get("tool_calls")):
            raise BadCell(f"holds {_held(content)} as content of message {index}; text is expected")
        messages.append(message)
    return messages


def _standard(message: Message) -> Message:
    """Return a message with role and one text: ShareGPT's form has from and value, others a list of text parts."""
    if "role" not in message and {"from", "value"} <= message.keys():
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        speaker = message["from"]
        role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message = {"role": role, "content": message["value"], **rest}
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    found = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        return message
    return {**message, "content": "".join(texts)}


def _held(content: Any) -> str:
    """Describe content that is no text."""
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return f"a part of type {odd[0]}" if (odd := [kind for kind in kinds if kind != "text"]) else described(content)


def is_chat_text(text: str) -> bool:
    """True for a text that is meant as a list of chat messages, as in csv files: its items name their roles. Other texts may
    begin with brackets, too: an answer in JSON, a piece of code."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        value = json_text.loads(text)
    except json.JSONDecodeError:
        return _NAMED_ROLE.search(text) is not None
    return any(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)


def without_none(value: Any) -> Any:
    """Remove the entries that are None: parquet gives every mapping the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Parse a list or mapping that is written as JSON text, as in csv files."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value if value != "" else None
    try:
        return json_text.loads(value)
    except json.JSONDecodeError as error:
        raise BadCell(f"holds text that is not JSON: {error.msg} at character {error.pos}") from None


def value_at(record: Record, column: str) -> Any:
    """Return the value of a column; a column with exactly this name takes precedence over a nested one."""
    if column in record:
        return record[column]
    first, *rest = column.split(".")
    value = record.get(first)
    for depth, key in enumerate(rest, start=1):
        value = from_json(value)
        inside = ".".join([first, *rest[: depth - 1]])
        if not isinstance(value, Mapping):
            raise BadCell(f"cannot be reached: {inside} holds {described(value)}")
        if key not in value:
            raise BadCell(f"cannot be reached: there is no {key!r} in {inside}; {did_you_mean(key, list(value))}")
        value = value[key]
    return value


def answer_of(value: Any) -> str:
    """Return a response; a whole number is written out, as the answers of many datasets are."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text_of(value)


def optional_text(record: Record, column: str | None) -> str:
    """Return the text of a column; "" without the column's name, or where it is empty or null."""
    if column is None:
        return ""
    value = value_at(record, column)
    return "" if value in (None, "") else text_of(value)


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise BadCell(f"holds {described(value)}; text is expected")
    if not value.strip():
        raise BadCell("holds an empty text")
    return value
