"""What clients ask for, and the shapes of the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.backends.endpoint.request import answer, read
from posttrain.data.chat_api import Refused, as_events
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

SAMPLING = SamplingParams(max_response_tokens=16, temperature=0.5, stop=("END",))
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def response(text: str, reason: StopReason = StopReason.EOS) -> Trajectory:
    return Trajectory(
        sample_id="s-0", token_ids=(5, 6), logprobs=(-0.5, -1.0), text=text, stop_reason=reason, policy_version=3
    )


def test_what_is_left_out_is_the_runs() -> None:
    asked = read(HELLO, SAMPLING, chat=True, any_sampling=False)
    assert (asked.max_tokens, asked.answers, asked.stream, asked.with_logprobs) == (16, 1, False, False)
    full = HELLO | {"model": "m", "max_completion_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 1, "stop": "END"}
    asked = read(
        full | {"presence_penalty": 0, "stream": True, "logprobs": True}, SAMPLING, chat=True, any_sampling=False
    )
    assert (asked.max_tokens, asked.answers, asked.stream, asked.with_logprobs) == (3, 2, True, True)


def test_messages_become_what_templates_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    asked = read({"messages": messages}, SAMPLING, chat=True, any_sampling=False)
    assert asked.messages is not None
    assert asked.messages[0]["content"] == "ab"
    assert asked.messages[1]["content"] == ""
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}


@pytest.mark.parametrize(("prompt", "read_as"), [("a", "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), (["a"], "a")])
def test_prompts_are_text_or_tokens(prompt: object, read_as: object) -> None:
    assert read({"prompt": prompt}, SAMPLING, chat=False, any_sampling=False).prompt == read_as


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "the body must be a JSON object"),
        ({}, "messages must be a list of at least one message"),
        ({"messages": [1]}, r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "holds a part that is not text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"messages\[0\].tool_calls are not calls"),
        (HELLO | {"temperature": 1}, r"temperature is 1, and this endpoint samples with 0.5 \(rollout.temperature\)"),
        (HELLO | {"stop": ["x"]}, "this endpoint stops at"),
        (HELLO | {"max_tokens": 17}, "max_tokens is 17; use 1 to 16"),
        (HELLO | {"n": True}, "n is true; use 1 to 64"),
        (HELLO | {"max_tokens": 0}, "max_tokens is 0; use 1 to 16"),
        (HELLO | {"max_completion_tokens": 0}, "max_tokens is 0; use 1 to 16"),
        (HELLO | {"max_tokens": ""}, 'max_tokens is ""; use 1 to 16'),
        (HELLO | {"max_tokens": False}, "max_tokens is false; use 1 to 16"),
        (HELLO | {"n": 0}, "n is 0; use 1 to 64"),
        (HELLO | {"n": []}, r"n is \[\]; use 1 to 64"),
        (HELLO | {"stop": 5}, "stop is 5; use a text, or a list of texts"),
        (HELLO | {"stop": 0}, "stop is 0; use a text, or a list of texts"),
        (HELLO | {"stop": {"a": 1}}, "stop is .*; use a text, or a list of texts"),
        (HELLO | {"stop": [5]}, r"stop is \[5\]; use a text, or a list of texts"),
        (HELLO | {"stop": [[]]}, "use a text, or a list of texts"),
        (HELLO | {"seed": 5}, "seed=5 is not supported"),
        (HELLO | {"presence_penalty": 0.1}, "presence_penalty=0.1 is not supported"),
        (HELLO | {"temprature": 0.5}, "temprature is not known"),
        (HELLO | {"tools": {}, "tool_choice": "required"}, "tool_choice must be auto"),
        (HELLO | {"tools": ["x"]}, "tools must be a list of functions"),
    ],
)
def test_what_cannot_be_answered(body: Any, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        read(body, SAMPLING, chat=True, any_sampling=False)


def test_what_is_null_is_the_default_and_a_stop_of_no_text_is_refused_in_any_case() -> None:
    asked = read(HELLO | {"max_tokens": None, "n": None, "stop": None}, SAMPLING, chat=True, any_sampling=False)
    assert (asked.max_tokens, asked.answers) == (16, 1)
    assert read(HELLO | {"stop": []}, SAMPLING, chat=True, any_sampling=False).answers == 1
    with pytest.raises(Refused, match="stop is 5"):
        read(HELLO | {"stop": 5}, SAMPLING, chat=True, any_sampling=True)


def test_everything_wrong_is_told_at_once_and_sampling_can_be_let_pass() -> None:
    with pytest.raises(Refused) as caught:
        read({"temperature": 2, "n": 0.5, "prompt": 7}, SAMPLING, chat=False, any_sampling=False)
    assert str(caught.value).count(";") == 4  # one within the first, after "(rollout.temperature)", and in n's
    assert read(HELLO | {"temperature": 2}, SAMPLING, chat=True, any_sampling=True).answers == 1


def test_a_chat_answer_with_a_tool_call() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    asked = read(HELLO | {"tools": [tool], "logprobs": True}, SAMPLING, chat=True, any_sampling=False)
    text = 'Let me see. <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><tool_call>{</tool_call>'
    whole = answer("r-0", "m", 9, asked, 4, [response(text), response("ok", StopReason.LENGTH)])
    first, second = whole["choices"]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "Let me see."
    [call] = first["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"zone": "UTC"})
    assert first["logprobs"]["content"][1] == {"token": "token_id:6", "logprob": -1.0}
    assert (second["finish_reason"], second["message"]["content"]) == ("length", "ok")
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}


def test_the_same_as_events() -> None:
    asked = read(HELLO | {"n": 2}, SAMPLING, chat=True, any_sampling=False)
    events = as_events(answer("r-0", "m", 9, asked, 4, [response("a"), response("b")]))
    assert events[-1] == "data: [DONE]\n\n"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [event["choices"][0]["delta"]["content"] for event in parsed[:2]] == ["a", "b"]
    assert parsed[2]["usage"]["total_tokens"] == 8 and parsed[2]["choices"] == []


def test_a_completion() -> None:
    asked = read({"prompt": "a", "logprobs": 1}, SAMPLING, chat=False, any_sampling=False)
    [choice] = answer("r-0", "m", 9, asked, 1, [response("b")])["choices"]
    assert choice["text"] == "b"
    assert choice["logprobs"] == {"token_ids": [5, 6], "token_logprobs": [-0.5, -1.0]}
