"""Messages of requests: what cannot be honoured is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.chat_api import Refused, messages_of, tool_problems, word_problems

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [{"role": "robot", "content": "a"}],
            r'messages\[0\].role is "robot"; use system, user, assistant, tool or developer',
        ),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
        (
            [{"role": "user", "content": [IMAGE]}],
            r"\(image_url\); this endpoint reads text",
        ),
        (
            [USER, {"role": "tool", "content": "1"}],
            r"messages\[1\] is the answer of a tool, and no message of the assistant",
        ),
        (
            [USER, CALLING, {"role": "tool", "tool_call_id": "c2", "content": "1"}],
            r'messages\[2\].tool_call_id is "c2".*"c1"',
        ),
        (
            [{**CALLING, "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]}],
            "with a name and arguments in JSON",
        ),
        (
            [{**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "with a name and arguments in JSON",
        ),
    ],
)
def test_messages_that_are_refused(messages: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(Refused, match=why):
        messages_of(messages)


def test_answers_of_tools_follow_their_calls_and_a_developer_is_the_system() -> None:
    answers = [{"role": "tool", "tool_call_id": "c1", "content": "1"}, {"role": "tool", "content": "2"}]
    found = messages_of([{"role": "developer", "content": "s"}, USER, CALLING, *answers])
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "tool"]
    # A program that parses calls in the text itself sends no calls, and answers of tools by any id.
    assert messages_of([USER, {"role": "assistant", "content": "f()"}, answers[0]])[2]["content"] == "1"


def test_tools_without_a_name_and_words_for_booleans() -> None:
    assert list(tool_problems({"tools": [{"type": "function"}]})) == ["tools[0] is no function with a name"]
    assert list(word_problems({"stream": "yes"})) == ['stream is "yes"; use true or false']
