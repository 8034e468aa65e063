"""What clients ask for, and the shapes of the answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.answer import EchoedPrompt, answer
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.data.openai_api.request import EndpointRequest, read
from posttrain.data.stream_events import events_of, in_one_piece
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

SAMPLING = SamplingParams(max_response_tokens=16, temperature=0.5, stop=("END",))
IGNORED = frozenset({*DISTRIBUTION, "stop"})
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def response(text: str, reason: StopReason = StopReason.EOS) -> Trajectory:
    return Trajectory(
        sample_id="s-0", token_ids=(5, 6), logprobs=(-0.5, -1.0), text=text, stop_reason=reason, policy_version=3
    )


def test_what_is_left_out_is_the_runs() -> None:
    asked = read(HELLO, SAMPLING, chat=True, honours=Honours())
    assert (asked.max_tokens, asked.answers, asked.stream, asked.with_logprobs) == (16, 1, False, False)
    full = HELLO | {"model": "m", "max_completion_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 1, "stop": "END"}
    asked = read(
        full | {"presence_penalty": 0, "stream": True, "logprobs": True}, SAMPLING, chat=True, honours=Honours()
    )
    assert (asked.max_tokens, asked.answers, asked.stream, asked.with_logprobs) == (3, 2, True, True)


def test_messages_become_what_templates_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    asked = read({"messages": messages}, SAMPLING, chat=True, honours=Honours())
    assert asked.messages is not None
    assert asked.messages[0]["content"] == "ab"
    assert asked.messages[1]["content"] == ""
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}


@pytest.mark.parametrize(("prompt", "read_as"), [("a", "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), (["a"], "a")])
def test_prompts_are_text_or_tokens(prompt: object, read_as: object) -> None:
    assert read({"prompt": prompt}, SAMPLING, chat=False, honours=Honours()).prompts == (read_as,)


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
        (HELLO | {"tools": {}, "tool_choice": "required"}, 'tool_choice is "required", and there are no tools'),
        (HELLO | {"tool_choice": "always"}, "tool_choice is .*; use auto"),
        (HELLO | {"tools": ["x"]}, "tools must be a list of functions"),
    ],
)
def test_what_cannot_be_answered(body: Any, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        read(body, SAMPLING, chat=True, honours=Honours())


def test_what_is_null_is_the_default_and_a_stop_of_no_text_is_refused_in_any_case() -> None:
    asked = read(HELLO | {"max_tokens": None, "n": None, "stop": None}, SAMPLING, chat=True, honours=Honours())
    assert (asked.max_tokens, asked.answers) == (16, 1)
    assert read(HELLO | {"stop": []}, SAMPLING, chat=True, honours=Honours()).answers == 1
    with pytest.raises(Refused, match="stop is 5"):
        read(HELLO | {"stop": 5}, SAMPLING, chat=True, honours=Honours(ignored=IGNORED))


def test_everything_wrong_is_told_at_once_and_sampling_can_be_let_pass() -> None:
    with pytest.raises(Refused) as caught:
        read({"temperature": 2, "n": 0.5, "prompt": 7}, SAMPLING, chat=False, honours=Honours())
    assert str(caught.value).count(";") == 4  # one within the first, after "(rollout.temperature)", and in n's
    assert read(HELLO | {"temperature": 2}, SAMPLING, chat=True, honours=Honours(ignored=IGNORED)).answers == 1


def test_a_chat_answer_with_a_tool_call() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    asked = read(HELLO | {"tools": [tool], "logprobs": True}, SAMPLING, chat=True, honours=Honours())
    text = 'Let me see. <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><tool_call>{</tool_call>'
    whole = answer("r-0", "m", 9, asked, 4, [response(text), response("ok", StopReason.LENGTH)])
    first, second = whole["choices"]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "Let me see."
    [call] = first["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"zone": "UTC"})
    of_token = {"token": "token_id:6", "token_id": 6, "logprob": -1.0, "bytes": list(b"token_id:6"), "top_logprobs": []}
    assert first["logprobs"]["content"][1] == of_token
    assert (second["finish_reason"], second["message"]["content"]) == ("length", "ok")
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}


def test_the_same_as_events() -> None:
    asked = read(HELLO | {"n": 2}, SAMPLING, chat=True, honours=Honours())
    whole = answer("r-0", "m", 9, asked, 4, [response("a"), response("b")])
    head = {name: whole[name] for name in ("id", "created", "model")}
    assert not any(
        "usage" in event for event in in_one_piece(whole, events_of(head, chat=True, as_items=False, with_usage=False))
    )
    events = list(in_one_piece(whole, events_of(head, chat=True, as_items=False, with_usage=True)))
    assert events[-1] == "data: [DONE]\n\n"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [event["choices"][0]["delta"]["content"] for event in parsed[:2]] == ["a", "b"]
    assert parsed[2]["usage"]["total_tokens"] == 8 and parsed[2]["choices"] == []


def test_a_completion() -> None:
    asked = read({"prompt": "a", "logprobs": 1}, SAMPLING, chat=False, honours=Honours())
    [choice] = answer("r-0", "m", 9, asked, 1, [response("b")])["choices"]
    assert choice["text"] == "b"
    texts = ["token_id:5", "token_id:6"]
    assert choice["logprobs"] == {"token_ids": [5, 6], "tokens": texts, "token_logprobs": [-0.5, -1.0]}


def test_seeds_of_requests_where_the_sampler_draws_by_them() -> None:
    assert read(HELLO | {"seed": 5}, SAMPLING, chat=True, honours=Honours(seeds=True)).seed == 5
    for seed in ("5", True, 2**63):
        with pytest.raises(Refused, match=r"seed is .*; use a whole number"):
            read(HELLO | {"seed": seed}, SAMPLING, chat=True, honours=Honours(seeds=True))
    for more, chat in (({"top_logprobs": 3}, True), ({"logprobs": 5}, False)):
        with pytest.raises(Refused, match="of the sampled tokens only"):
            read({**HELLO, "prompt": "a", **more}, SAMPLING, chat=chat, honours=Honours())


def own(body: dict[str, Any], *, any_sampling: bool = False) -> EndpointRequest:
    """Read a chat request for a sampler that takes the parameters of each request."""
    return read(
        HELLO | body,
        SAMPLING,
        chat=True,
        honours=Honours(ignored=IGNORED if any_sampling else frozenset(), distributions=DISTRIBUTION, stops=True),
    )


def test_sampling_of_its_own_where_the_sampler_takes_it() -> None:
    asked = own({"temperature": 0, "top_p": 0.9, "top_k": 5, "stop": ["\n", "END", "\n"]})
    assert asked.sampling == replace(SAMPLING, temperature=0, top_p=0.9, top_k=5, stop=("END", "\n"))
    assert asked.stop == ("\n", "END", "\n")
    assert own({"stop": "x"}).sampling == replace(SAMPLING, stop=("END", "x"))
    assert own({"top_k": -1}).sampling is None
    assert own({"temperature": 0.5, "top_p": 1.0, "top_k": None, "stop": "END"}).sampling is None
    ignored = own({"temperature": 2, "top_k": 3, "stop": "x"}, any_sampling=True)
    assert (ignored.sampling, ignored.stop) == (None, ())


def test_a_temperature_of_its_own_is_that_of_the_first_token_too() -> None:
    first = replace(SAMPLING, first_token_temperature=2.0, first_token_top_k=7)
    asked = read(HELLO | {"temperature": 1}, first, chat=True, honours=Honours(distributions=DISTRIBUTION, stops=True))
    assert asked.sampling == replace(SAMPLING, temperature=1)
    asked = read(HELLO | {"top_p": 0.5}, first, chat=True, honours=Honours(distributions=DISTRIBUTION, stops=True))
    assert asked.sampling == replace(first, top_p=0.5)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1; use 0 \(greedy\), or a number from 1e-06 to 1e\+06"),
        ({"temperature": True}, "temperature is true; use 0"),
        ({"temperature": "1"}, 'temperature is "1"; use 0'),
        ({"temperature": float("inf")}, "temperature is Infinity; use 0"),
        ({"temperature": float("nan")}, "temperature is NaN; use 0"),
        ({"temperature": 1e-40}, "temperature is 1e-40; use 0"),  # logits over it are infinite
        ({"temperature": 10**400}, "temperature is 10000"),  # no float
        ({"top_p": 0}, "top_p is 0; use a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p is 1.1; use a number above 0"),
        ({"top_k": 2.5}, "top_k is 2.5; use a whole number"),
        ({"top_k": -2}, "top_k is -2; use a whole number"),
        ({"top_k": False}, "top_k is false; use a whole number"),
        ({"stop": ["a", ""]}, "stop holds an empty text"),
    ],
)
def test_impossible_sampling_is_refused_in_any_case(body: dict[str, Any], problem: str) -> None:
    for samplings, any_sampling in ((True, False), (False, False), (False, True)):
        with pytest.raises(Refused, match=problem):
            read(
                HELLO | body,
                SAMPLING,
                chat=True,
                honours=Honours(
                    ignored=IGNORED if any_sampling else frozenset(), distributions=samplings, stops=samplings
                ),
            )


def test_top_k_is_compared_where_the_sampler_has_one_distribution() -> None:
    for top_k in (0, -1):
        assert read(HELLO | {"top_k": top_k}, SAMPLING, chat=True, honours=Honours()).sampling is None
    with pytest.raises(Refused, match=r"top_k is 4, and this endpoint samples with 0 \(rollout.top_k\)"):
        read(HELLO | {"top_k": 4}, SAMPLING, chat=True, honours=Honours())


def test_the_answer_ends_before_the_stop_text_of_its_request() -> None:
    stopped = response("one;\n two END", StopReason.STOP_TEXT)
    texts = {"END": "one;\n two ", "\n": "one;", "y": "one;\n two END"}
    for stop, text in texts.items():
        [choice] = answer("r-0", "m", 9, own({"stop": stop}), 4, [stopped])["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    [choice] = answer("r-0", "m", 9, own({"stop": "one"}), 4, [response("one")])["choices"]
    assert choice["message"]["content"] == "one"  # it ended otherwise


def topped(body: dict[str, Any], *, chat: bool) -> EndpointRequest:
    """Read a request for a sampler that reports the likeliest tokens."""
    asked = HELLO | body if chat else {"prompt": "a", **body}
    return read(asked, SAMPLING, chat=chat, honours=Honours(tops=True))


TOPS = replace(response("b"), top_logprobs=(((5, -0.5), (7, -2.0)), ((8, -0.25), (9, -3.0))))


def test_the_likeliest_tokens_of_a_chat() -> None:
    asked = topped({"logprobs": True, "top_logprobs": 2}, chat=True)
    assert asked.top_logprobs == 2
    [choice] = answer("r-0", "m", 9, asked, 4, [TOPS], text_of=chr)["choices"]
    first, second = choice["logprobs"]["content"]
    assert (second["token_id"], second["logprob"]) == (6, -1.0)
    assert [(one["token_id"], one["logprob"]) for one in first["top_logprobs"]] == [(5, -0.5), (7, -2.0)]
    assert second["top_logprobs"][0] == {"token": "\x08", "token_id": 8, "logprob": -0.25, "bytes": [8]}


def test_the_likeliest_tokens_of_a_completion_and_the_sampled_one() -> None:
    [choice] = answer("r-0", "m", 9, topped({"logprobs": 2}, chat=False), 4, [TOPS], text_of=chr)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"\x05": -0.5, "\x07": -2.0},
        {"\x08": -0.25, "\t": -3.0, "\x06": -1.0},
    ]
    assert (topped({"logprobs": 0}, chat=False).with_logprobs, topped({"logprobs": 0}, chat=False).top_logprobs) == (
        True,
        0,
    )


@pytest.mark.parametrize(
    ("body", "chat", "problem"),
    [
        ({"logprobs": True, "top_logprobs": 21}, True, "top_logprobs is 21; use 0 to 20"),
        ({"logprobs": True, "top_logprobs": 1.0}, True, "top_logprobs is 1.0; use 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, True, "top_logprobs is -1; use 0 to 20"),
        ({"top_logprobs": 2}, True, "top_logprobs is 2, which needs logprobs: true"),
        ({"logprobs": 6}, False, "logprobs is 6; use 0 to 5"),
        ({"logprobs": "2"}, False, 'logprobs is "2"; use 0 to 5'),
    ],
)
def test_more_likeliest_tokens_than_are_given(body: dict[str, Any], chat: bool, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        topped(body, chat=chat)


def test_likeliest_tokens_with_the_same_text_are_all_there() -> None:
    asked = topped({"logprobs": 2}, chat=False)
    [choice] = answer("r-0", "m", 9, asked, 4, [TOPS], text_of=lambda token: "\ufffd")["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"\ufffd": -0.5, "token_id:7": -2.0},
        {"\ufffd": -0.25, "token_id:9": -3.0, "token_id:6": -1.0},
    ]


def test_an_echoed_prompt_with_its_log_probs() -> None:
    """The likeliest token of a prompt's place may be the one that is there."""
    body = {"prompt": [[3, 4], "ab"], "echo": True, "max_tokens": 0, "logprobs": 1}
    asked = read(body, SAMPLING, chat=False, honours=Honours(tops=True, echoes=True))
    assert (asked.prompts, asked.max_tokens) == (((3, 4), "ab"), 0)
    empty = replace(response(""), token_ids=(), logprobs=(), stop_reason=StopReason.LENGTH)
    first = replace(empty, prompt_logprobs=(-2.0,), prompt_top_logprobs=(((9, -0.5),),))
    second = replace(empty, prompt_logprobs=(-0.5,), prompt_top_logprobs=(((8, -0.5),),))
    prompts = [EchoedPrompt("xy", (3, 4)), EchoedPrompt("ab", (7, 8))]
    whole = answer("r-0", "m", 9, asked, 4, [first, second], prompts=prompts)
    one, two = whole["choices"]
    assert (one["text"], two["text"], two["index"], one["finish_reason"]) == ("xy", "ab", 1, "length")
    assert one["logprobs"] == {
        "token_ids": [3, 4],
        "tokens": ["token_id:3", "token_id:4"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"token_id:9": -0.5, "token_id:4": -2.0}],
    }
    assert two["logprobs"]["top_logprobs"] == [None, {"token_id:8": -0.5}]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": "a", "echo": 1}, "echo is 1; use true or false"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "rollout.engine native"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; use 1 to"),
        ({"prompt": ["a", ""]}, "prompt must be a text or a list of token ids, or a list of up to 256 of these"),
        ({"prompt": [1, "a"]}, "prompt must be a text"),
        ({"prompt": ["a"] * 257}, "prompt must be a text"),
        ({"prompt": [True]}, "prompt must be a text"),
    ],
)
def test_what_cannot_be_echoed_or_completed(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        read(body, SAMPLING, chat=False, honours=Honours())


def test_the_temperature_of_a_request_to_a_run_that_trains_it() -> None:
    run = Honours(distributions=frozenset({"temperature"}), greedy=False)
    asked = read(HELLO | {"temperature": 2, "top_p": 1}, SAMPLING, chat=True, honours=run)
    assert asked.sampling == replace(SAMPLING, temperature=2)
    for more, problem in (
        ({"temperature": 0}, "temperature is 0, which draws the likeliest token without chance"),
        ({"top_p": 0.5}, "top_p is 0.5, and this endpoint samples with 1"),
    ):
        with pytest.raises(Refused, match=problem):
            read(HELLO | more, SAMPLING, chat=True, honours=run)
    ignoring = replace(run, ignored=DISTRIBUTION)
    assert read(HELLO | {"temperature": 0}, SAMPLING, chat=True, honours=ignoring).sampling is None
