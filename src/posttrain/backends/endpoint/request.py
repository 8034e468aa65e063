"""Requests and answers of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.backends.endpoint.answer_format import grammar_of
from posttrain.backends.endpoint.own_sampling import (
    before_stop,
    difference_problems,
    own_sampling,
    stops_of,
    value_problems,
)
from posttrain.data.chat_api import (
    Refused,
    assistant_message,
    is_count,
    messages_of,
    tool_problems,
    tools_of,
    wants_usage,
    word_problems,
)
from posttrain.data.tool_forms import DEFAULT
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, Unfinished

_MOST_ANSWERS = 64
_MOST_PROMPTS = 256
_MOST_TOP_CHAT, _MOST_TOP = 20, 5  # likeliest tokens at a place, as OpenAI bounds them


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that answers begin with."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """A valid request."""

    messages: Sequence[Mapping[str, Any]] | None  # None: ``prompts`` are used
    prompts: tuple[str | tuple[int, ...], ...] = ()  # texts, or token ids
    tools: Sequence[Mapping[str, Any]] = ()
    answers: int = 1  # to each prompt
    echo: bool = False  # an answer begins with its prompt
    max_tokens: int
    stream: bool = False
    with_usage: bool = False  # at the end of a stream
    with_logprobs: bool = False
    seed: int | None = None  # of the draws; None: the endpoint's own
    sampling: SamplingParams | None = None  # None: the endpoint's
    top_logprobs: int = 0  # likeliest tokens at every place
    grammar: str = ""  # that answers are kept within
    stop: tuple[str, ...] = ()  # stop texts of its own, which are no part of the answer


def read(
    body: Any,
    sampling: SamplingParams,
    *,
    chat: bool,
    any_sampling: bool,
    seeds: bool = False,
    samplings: bool = False,
    tops: bool = False,
    echoes: bool = False,
    grammars: bool = False,
) -> EndpointRequest:
    """Parse a request.

    Args: any_sampling, what it says of sampling is ignored; seeds, the sampler draws by the seed of a request; samplings, from
        its distribution, to its stop texts; tops, it reports the likeliest tokens; echoes, it
        reports the log-probs of a prompt's tokens; grammars, it keeps a response within a grammar.
    Raises: Refused with all problems.
    """
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    problems = list(value_problems(body))
    own = samplings and not any_sampling and not problems
    if not (samplings or any_sampling or problems):
        problems += difference_problems(body, sampling)
    seed = body.get("seed") if seeds else None
    read_here = {"top_k", "response_format", *(("seed",) if seeds else ()), *(() if chat else ("echo",))}
    problems += word_problems({name: value for name, value in body.items() if name not in read_here})
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 2**63):
        problems.append(f"seed is {json.dumps(seed)[:60]}; use a whole number of 64 bits")
    most = sampling.max_response_tokens
    max_tokens = next(
        (body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), most
    )
    echo = False if chat else body.get("echo") or False
    if not isinstance(echo, bool):
        problems.append(f"echo is {json.dumps(echo)[:60]}; use true or false")
    elif echo and body.get("logprobs") not in (None, False) and not echoes:
        problems.append(
            "echo with logprobs is for samplers that report the log-probs of a request's prompt: rollout.engine native"
        )
    if not is_count(max_tokens, most) and not (echo and type(max_tokens) is int and max_tokens == 0):
        problems.append(f"max_tokens is {json.dumps(max_tokens)}; use 1 to {most} (rollout.max_response_tokens)")
    answers = 1 if body.get("n") is None else body["n"]
    if not is_count(answers, _MOST_ANSWERS):
        problems.append(f"n is {json.dumps(answers)}; use 1 to {_MOST_ANSWERS}")
    problems += tool_problems(body)
    grammar, problem = grammar_of(body, grammars=grammars)
    problems += [problem] if problem else []
    if chat and body.get("logprobs") not in (None, True, False):
        problems.append(f"logprobs is {json.dumps(body['logprobs'])[:60]}; use true or false")
    problems += _top_problems(body, chat=chat, tops=tops)
    messages: list[dict[str, Any]] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    try:
        if chat:
            messages = messages_of(body.get("messages"))
        else:
            prompts = _prompts(body.get("prompt"))
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        raise Refused("; ".join(problems))
    logprobs = body.get("logprobs")
    return EndpointRequest(
        messages=messages,
        prompts=prompts,
        echo=bool(echo),
        tools=tools_of(body),
        answers=answers,
        max_tokens=max_tokens,
        stream=bool(body.get("stream")),
        with_usage=wants_usage(body),
        with_logprobs=logprobs is not None and logprobs is not False,
        seed=seed,
        sampling=own_sampling(body, sampling) if own else None,
        top_logprobs=int(body.get("top_logprobs" if chat else "logprobs") or 0) if tops else 0,
        grammar=grammar,
        stop=stops_of(body) if own else (),
    )


def _top_problems(body: Mapping[str, Any], *, chat: bool, tops: bool) -> Iterator[str]:
    """Yield the problem of the number of likeliest tokens. True and 1 ask a completion for log-probs of the sampled tokens where
    the sampler reports no others."""
    name, most = ("top_logprobs", _MOST_TOP_CHAT) if chat else ("logprobs", _MOST_TOP)
    count = body.get(name)
    if not tops:
        if count not in (None, False, True, 0, 1) or (chat and count):
            yield f"{name} is {json.dumps(count)[:60]}; log-probs are those of the sampled tokens only"
    elif count not in (None, False) and not (
        is_count(count, most) or (type(count) is int and count == 0) or count is True
    ):
        yield f"{name} is {json.dumps(count)[:60]}; use 0 to {most}"
    elif chat and count and body.get("logprobs") is not True:
        yield f"top_logprobs is {json.dumps(count)}, which needs logprobs: true"


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    several = given if isinstance(given, list) and given and not _is_ids(given) else [given]
    if len(several) > _MOST_PROMPTS or not all(_is_ids(one) or (isinstance(one, str) and one) for one in several):
        raise Refused(f"prompt must be a text or a list of token ids, or a list of up to {_MOST_PROMPTS} of these")
    return tuple(one if isinstance(one, str) else tuple(one) for one in several)


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


_FINISHED = {StopReason.EOS: "stop", StopReason.STOP_TEXT: "stop", StopReason.LENGTH: "length"}


def answer(
    name: str,
    model: str,
    created: int,
    asked: EndpointRequest,
    prompt_tokens: int,
    responses: Sequence[Trajectory],
    form: str = DEFAULT,
    text_of: Callable[[int], str] = lambda token: f"token_id:{token}",
    prompts: Sequence[EchoedPrompt] = (),
) -> dict[str, Any]:
    """Build the body of an answer. ``form``, of tool calls; text_of, of a token; prompts, those that answers begin with."""
    chat = asked.messages is not None
    completion_tokens = sum(len(response.token_ids) for response in responses)
    return {
        "id": name,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            choice_of(index, asked, response, form, text_of, prompts[index // asked.answers] if asked.echo else None)
            for index, response in enumerate(responses)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def shown_text(asked: EndpointRequest, response: Trajectory) -> str:
    """Return the text of an answer: that of the response, up to the request's own stop text where one ended it."""
    ended_by_stop = response.stop_reason is StopReason.STOP_TEXT
    return before_stop(response.text, asked.stop) if ended_by_stop else response.text


def choice_of(
    index: int,
    asked: EndpointRequest,
    response: Trajectory,
    form: str,
    text_of: Callable[[int], str],
    echoed: EchoedPrompt | None = None,
) -> dict[str, Any]:
    """Build one of the choices of an answer."""
    choice: dict[str, Any] = {"index": index, "finish_reason": _FINISHED[response.stop_reason]}
    choice["logprobs"] = logprobs_of(asked, response, text_of)
    text = shown_text(asked, response)
    if asked.messages is None:
        choice["text"] = text if echoed is None else echoed.text + text
        if asked.with_logprobs and echoed is not None:
            _echo(choice["logprobs"], echoed, response, text_of)
        return choice
    message = assistant_message(text, response.sample_id, tools=asked.tools, form=form)
    if "tool_calls" in message:
        choice["finish_reason"] = "tool_calls"
    choice["message"] = message
    return choice


def logprobs_of(
    asked: EndpointRequest, sampled: Trajectory | Unfinished, text_of: Callable[[int], str], first: int = 0
) -> dict[str, Any] | None:
    """Return the log-probs of a response's tokens from ``first`` on, as the request asks for them; None where it does not."""
    if not asked.with_logprobs:
        return None
    pairs = list(zip(sampled.token_ids, sampled.logprobs, strict=True))[first:]
    tops = sampled.top_logprobs[first:]
    if asked.messages is not None:
        return {
            "content": [
                {**_token(text_of, *pair), "top_logprobs": [_token(text_of, *one) for one in place]}
                for pair, place in zip(pairs, tops or ((),) * len(pairs), strict=True)
            ]
        }
    found: dict[str, Any] = {
        "token_ids": [token for token, _ in pairs],
        "tokens": [text_of(token) for token, _ in pairs],
        "token_logprobs": [logprob for _, logprob in pairs],
    }
    if asked.top_logprobs:
        found["top_logprobs"] = [_by_text((*place, pair), text_of) for place, pair in zip(tops, pairs, strict=True)]
    return found


def _echo(logprobs: dict[str, Any], echoed: EchoedPrompt, response: Trajectory, text_of: Callable[[int], str]) -> None:
    """Put a prompt's tokens before those of its answer. Its first token has no log-prob."""
    ids, found = echoed.token_ids, response.prompt_logprobs
    logprobs["token_ids"][:0] = ids
    logprobs["tokens"][:0] = [text_of(token) for token in ids]
    logprobs["token_logprobs"][:0] = [None, *found]
    if "top_logprobs" in logprobs:
        scored = zip(response.prompt_top_logprobs, zip(ids[1:], found, strict=True), strict=True)
        logprobs["top_logprobs"][:0] = [None, *(_by_text((*place, one), text_of) for place, one in scored)]


def _by_text(place: Sequence[tuple[int, float]], text_of: Callable[[int], str]) -> dict[str, float]:
    """Return log-probs by the text of their tokens. Tokens can have the same text, such as parts of a character: the first is
    named by it, and the others by their ids."""
    found: dict[str, float] = {}
    for token, logprob in dict(place).items():
        text = text_of(token)
        found[f"token_id:{token}" if text in found else text] = logprob
    return found


def _token(text_of: Callable[[int], str], token: int, logprob: float) -> dict[str, Any]:
    text = text_of(token)
    return {"token": text, "token_id": token, "logprob": logprob, "bytes": list(text.encode())}
