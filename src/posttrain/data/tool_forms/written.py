"""Turns of the policy as chat templates take them, and the special tokens that belong to their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import calls_of, marks_of, without_marks
from posttrain.interfaces.env import Message
from posttrain.registry import TOOL_FORMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def as_message(form: str, text: str) -> Message:
    """Return a turn of the policy as the chat template takes it: plain text, unless the form needs calls as messages."""
    if not TOOL_FORMS.facts(form).calls_as_messages:
        return assistant(text)
    calls = _calls(form, text)
    return _calling(calls) if calls else assistant(without_marks(form, text))


def probe_message(form: str, text: str, probe: str) -> Message:
    """Return the same message with ``probe`` in place of what the policy wrote last."""
    calls = _calls(form, text) if TOOL_FORMS.facts(form).calls_as_messages else []
    return _calling([*calls[:-1], replace(calls[-1], arguments={"": probe})]) if calls else assistant(probe)


def history_of(form: str, messages: Sequence[Message]) -> list[Message]:
    """Return a conversation as the chat template takes it."""
    if not TOOL_FORMS.facts(form).calls_as_messages:
        return list(messages)
    return [
        as_message(form, str(message.get("content") or ""))
        if message.get("role") == "assistant" and "tool_calls" not in message
        else message
        for message in messages
    ]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def mark_ids(tokenizer: PreTrainedTokenizerBase, form: str) -> frozenset[int]:
    """Return the special tokens of a tokenizer that are marks of a form. The end token is no part of a text."""
    marks, special = set(marks_of(form)), tokenizer.added_tokens_decoder.items()
    end = tokenizer.eos_token_id
    return frozenset(number for number, token in special if token.special and token.content in marks and number != end)


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], form: str = "") -> str:
    """Decode tokens without special tokens, but for the marks of the form of tool calls."""
    kept = mark_ids(tokenizer, form) if form else frozenset()
    if kept.isdisjoint(token_ids):
        text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    else:
        dropped = special_ids(tokenizer) - kept
        text = tokenizer.decode([token for token in token_ids if token not in dropped], skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def _calls(form: str, text: str) -> list[ToolCall]:
    return [call for call in calls_of(form, text, {}) if not call.problem]


def _calling(calls: Sequence[ToolCall]) -> Message:
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }
