"""Replies of models whose form has channels: thoughts apart from the answer, whole and in a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.data.chat_api import added_messages, assistant_message, messages_of
from posttrain.data.openai_api.answer import LiveAnswer, answer
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.data.responses_api import as_response
from posttrain.data.stream_events import events_of
from posttrain.data.tool_forms.channels import Said, said_in
from posttrain.records.trajectories import StopReason, Trajectory, Unfinished

THINK = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
GPT = f"{THINK}<|channel|>final<|message|>It is 1 < 2."
K3_CALL = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
K3 = "Let me see.<|close|>think<|sep|><|open|>response<|sep|>It is 1 < 2.<|close|>response<|sep|>"
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},)


@pytest.mark.parametrize(
    ("form", "reply", "content", "reasoning"),
    [
        ("gpt_oss", GPT, "It is 1 < 2.", "Let me see."),
        ("gpt_oss", "It is.", "It is.", ""),
        ("gpt_oss", THINK + CALL, "", "Let me see."),
        ("gpt_oss", THINK + "<|channel|>commentary<|message|>First I look.<|end|>", "First I look.", "Let me see."),
        ("gpt_oss", "<|channel|>analysis<|message|>cut he", "", "cut he"),
        ("kimi_k3", K3, "It is 1 < 2.", "Let me see."),
        ("kimi_k3", "<|open|>think<|sep|>" + K3 + K3_CALL, "It is 1 < 2.", "Let me see."),
        ("kimi_k3", "It is.<|close|>response<|sep|>", "It is.", ""),
        ("kimi_k3", "<|open|>think<|sep|>cut he", "", "cut he"),
        ("hermes", "<think>a</think>b", "<think>a</think>b", ""),
    ],
)
def test_parts_of_a_reply(form: str, reply: str, content: str, reasoning: str) -> None:
    assert said_in(form, reply) == Said(content, reasoning)


@pytest.mark.parametrize(("form", "reply"), [("gpt_oss", THINK + CALL), ("kimi_k3", K3 + K3_CALL)])
def test_calls_stand_beside_the_parts(form: str, reply: str) -> None:
    message = assistant_message(reply, "r", tools=TOOLS, form=form)
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == (None if form == "gpt_oss" else "It is 1 < 2.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    # A client that sends it back, with or without the thoughts, continues the conversation.
    before = [{"role": "user", "content": "Q"}]
    for sent in (message, {name: value for name, value in message.items() if name != "reasoning_content"}):
        messages = messages_of([*before, sent, {"role": "tool", "content": "R"}])
        assert added_messages(before, message, messages) == [{"role": "tool", "content": "R"}]


def test_a_call_that_is_none_is_shown() -> None:
    message = assistant_message(THINK + CALL, "r", tools=(), form="gpt_oss")
    assert (message["content"], message["reasoning_content"]) == ('{"a": 1}', "Let me see.")


def streamed(
    form: str, reply: str, size: int, *, as_items: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a reply that comes ``size`` characters at a time, and the whole answer."""
    asked = EndpointRequest(messages=[{"role": "user", "content": "Q"}], max_tokens=999, tools=TOOLS)
    whole = Trajectory(
        sample_id="r",
        token_ids=tuple(map(ord, reply)),
        logprobs=(0.0,) * len(reply),
        text=reply,
        stop_reason=StopReason.EOS,
        policy_version=0,
    )
    events = events_of({"id": "a", "created": 0, "model": "m"}, chat=True, as_items=as_items, with_usage=False)
    live = LiveAnswer(events, asked, 1, form=form, decode=lambda ids: "".join(map(chr, ids)), text_of=chr)
    told: list[str] = []
    for first in range(0, len(reply), size):
        ids = whole.token_ids[first : first + size]
        progress = Unfinished(sample_id="r", token_ids=ids, logprobs=(0.0,) * len(ids), spans=())
        told += live.grown(0, progress)
    told += live.ended(0, whole)
    body = answer("a", "m", 0, asked, 1, [whole], form)
    told += live.end(body)
    lines = [line.removeprefix("data: ") for each in told for line in each.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines], body


@pytest.mark.parametrize("size", [1, 3, 7, 400])
@pytest.mark.parametrize(
    ("form", "reply"), [("gpt_oss", GPT), ("gpt_oss", THINK + CALL), ("kimi_k3", K3), ("kimi_k3", K3 + K3_CALL)]
)
def test_a_stream_has_the_same_parts(form: str, reply: str, size: int) -> None:
    events, body = streamed(form, reply, size)
    deltas = [event["choices"][0]["delta"] for event in events]
    message = body["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert [bool(delta.get("tool_calls")) for delta in deltas].count(True) == ("tool_calls" in message)
    if size == 1 and form == "gpt_oss":
        assert deltas[0].keys() == {"role", "reasoning_content"}  # the first piece comes while it thinks


@pytest.mark.parametrize(("form", "reply"), [("gpt_oss", GPT), ("kimi_k3", K3 + K3_CALL)])
def test_items_of_the_responses_api(form: str, reply: str) -> None:
    events, body = streamed(form, reply, 5, as_items=True)
    items = as_response(body)["output"]
    assert [item["type"] for item in items[:2]] == ["reasoning", "message"]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [done[place]["type"] for place in range(len(items))] == [item["type"] for item in items]
    assert done[0]["content"][0]["text"] == "Let me see." and done[1]["content"][0]["text"] == "It is 1 < 2."
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
