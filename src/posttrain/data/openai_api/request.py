"""Requests of OpenAI's API, as every endpoint reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import (
    Refused,
    is_count,
    messages_of,
    tool_problems,
    tools_of,
    wants_usage,
    word_problems,
)
from posttrain.data.openai_api.answer_format import grammar_of
from posttrain.data.openai_api.own_sampling import (
    DISTRIBUTION,
    Honours,
    difference_problems,
    own_sampling,
    stops_of,
    value_problems,
)
from posttrain.data.tool_forms import DEFAULT
from posttrain.records.trajectories import SamplingParams

_MOST_TOP_CHAT, _MOST_TOP = 20, 5  # likeliest tokens at a place, as OpenAI bounds them


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


def read(body: Any, sampling: SamplingParams, *, chat: bool, honours: Honours, form: str = DEFAULT) -> EndpointRequest:
    """Parse a request. Args: sampling, the endpoint's; form, in which the model writes tool calls.

    Raises: Refused with all problems.
    """
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    wrong = list(value_problems(body))
    problems = [*wrong, *(() if wrong else difference_problems(body, sampling, honours))]
    seeds = honours.seeds or "seed" in honours.ignored
    read_here = {*DISTRIBUTION, "response_format", *(("seed",) if seeds else ()), *(() if chat else ("echo",))}
    problems += word_problems({name: value for name, value in body.items() if name not in read_here})
    max_tokens, problem = _max_tokens(body, sampling.max_response_tokens, chat=chat, honours=honours)
    problems += [problem] if problem else []
    answers = 1 if body.get("n") is None else body["n"]
    if not is_count(answers, honours.most_answers):
        problems.append(f"n is {json.dumps(answers)[:60]}; use 1 to {honours.most_answers}")
    wrong_tools = list(tool_problems(body))
    grammar, problem = ("", "") if wrong_tools else grammar_of(body, honours, form)
    problems += [*wrong_tools, *([problem] if problem else [])]
    problems += _logprob_problems(body, chat=chat, honours=honours)
    messages: list[dict[str, Any]] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    try:
        if chat:
            messages = messages_of(body.get("messages"))
        else:
            prompts = _prompts(body.get("prompt"), honours.most_prompts)
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        raise Refused("; ".join(problems))
    logprobs = body.get("logprobs")
    return EndpointRequest(
        messages=messages,
        prompts=prompts,
        echo=not chat and bool(body.get("echo")),
        tools=tools_of(body),
        answers=answers,
        max_tokens=max_tokens,
        stream=bool(body.get("stream")),
        with_usage=wants_usage(body),
        with_logprobs=logprobs is not None and logprobs is not False,
        seed=body.get("seed") if honours.seeds and "seed" not in honours.ignored else None,
        sampling=own_sampling(body, sampling, honours),
        top_logprobs=int(body.get("top_logprobs" if chat else "logprobs") or 0) if honours.tops else 0,
        grammar=grammar,
        stop=stops_of(body) if honours.stops and "stop" not in honours.ignored else (),
    )


def _max_tokens(body: Mapping[str, Any], most: int, *, chat: bool, honours: Honours) -> tuple[int, str]:
    """Return the most tokens of an answer, and what is wrong with them ("" for nothing)."""
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    wanted = given[0] if given else most
    if is_count(wanted, most):
        return wanted, ""
    if honours.caps_tokens and is_count(wanted):
        return most, ""
    if honours.scores and not chat and body.get("echo") is True and type(wanted) is int and wanted == 0:
        return 0, ""
    allowed = "a whole number above 0" if honours.caps_tokens else f"1 to {most} (rollout.max_response_tokens)"
    return most, f"max_tokens is {json.dumps(wanted)[:60]}; use {allowed}"


def _logprob_problems(body: Mapping[str, Any], *, chat: bool, honours: Honours) -> Iterator[str]:
    asked, echo = body.get("logprobs"), None if chat else body.get("echo")
    if echo is not None and not isinstance(echo, bool):
        yield f"echo is {json.dumps(echo)[:60]}; use true or false"
    elif echo and asked not in (None, False) and not honours.echoes:
        yield "echo with logprobs is for samplers that report the log-probs of a request's prompt: rollout.engine native"
    if chat and asked not in (None, True, False):
        yield f"logprobs is {json.dumps(asked)[:60]}; use true or false"
    yield from _top_problems(body, chat=chat, tops=honours.tops)


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


def _prompts(given: Any, most: int) -> tuple[str | tuple[int, ...], ...]:
    several = given if isinstance(given, list) and given and not _is_ids(given) else [given]
    if len(several) > most or not all(_is_ids(one) or (isinstance(one, str) and one) for one in several):
        more = f", or a list of up to {most} of these" if most > 1 else ""
        raise Refused(f"prompt must be a text or a list of token ids{more}")
    return tuple(one if isinstance(one, str) else tuple(one) for one in several)


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)
