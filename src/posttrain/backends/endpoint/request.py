"""Requests and answers of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import Refused, assistant_message, is_count, messages_of, tool_problems, word_problems
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

_MOST_ANSWERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """A valid request."""

    messages: Sequence[Mapping[str, Any]] | None  # None: ``prompt`` is used
    prompt: str | tuple[int, ...] = ""  # text, or token ids
    tools: Sequence[Mapping[str, Any]] = ()
    answers: int = 1
    max_tokens: int
    stream: bool = False
    with_logprobs: bool = False


def read(body: Any, sampling: SamplingParams, *, chat: bool, any_sampling: bool) -> EndpointRequest:
    """Parse a request. Raises: Refused with all problems."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    problems = list(_sampling_problems(body, sampling)) if not any_sampling else []
    problems += [*word_problems(body), *_stop_problems(body)]
    most = sampling.max_response_tokens
    max_tokens = next(
        (body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), most
    )
    if not is_count(max_tokens, most):
        problems.append(f"max_tokens is {json.dumps(max_tokens)}; use 1 to {most} (rollout.max_response_tokens)")
    answers = 1 if body.get("n") is None else body["n"]
    if not is_count(answers, _MOST_ANSWERS):
        problems.append(f"n is {json.dumps(answers)}; use 1 to {_MOST_ANSWERS}")
    problems += tool_problems(body)
    messages: list[dict[str, Any]] | None = None
    prompt: str | tuple[int, ...] = ""
    try:
        if chat:
            messages = messages_of(body.get("messages"))
        else:
            prompt = _prompt(body.get("prompt"))
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        raise Refused("; ".join(problems))
    logprobs = body.get("logprobs")
    return EndpointRequest(
        messages=messages,
        prompt=prompt,
        tools=body.get("tools") or (),
        answers=answers,
        max_tokens=max_tokens,
        stream=bool(body.get("stream")),
        with_logprobs=logprobs is not None and logprobs is not False,
    )


def _sampling_problems(body: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """Check that a request's sampling parameters equal the run's: log-probs are those of a single distribution."""
    problems = []
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        asked = body.get(name)
        if asked is not None and asked != ours:
            problems.append(
                f"{name} is {json.dumps(asked)}, and this endpoint samples with {ours:g} (rollout.{name}); leave it out, or "
                "start it with endpoint.any_sampling=true"
            )
    stop = [] if list(_stop_problems(body)) else body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if any(one not in sampling.stop for one in stop):
        problems.append(
            f"stop is {json.dumps(stop)[:60]}, and this endpoint stops at {list(sampling.stop)} (rollout.stop)"
        )
    return problems


def _stop_problems(body: Mapping[str, Any]) -> Iterator[str]:
    stop = body.get("stop")
    of_texts = isinstance(stop, list) and all(isinstance(one, str) for one in stop)
    if stop is not None and not isinstance(stop, str) and not of_texts:
        yield f"stop is {json.dumps(stop)[:60]}; use a text, or a list of texts"


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, list) and given and all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        return tuple(given)
    if isinstance(given, list) and len(given) == 1:
        return _prompt(given[0])
    if not isinstance(given, str) or not given:
        raise Refused("prompt must be one text, or a list of token ids")
    return given


_FINISHED = {StopReason.EOS: "stop", StopReason.STOP_TEXT: "stop", StopReason.LENGTH: "length"}


def answer(
    name: str, model: str, created: int, asked: EndpointRequest, prompt_tokens: int, responses: Sequence[Trajectory]
) -> dict[str, Any]:
    """Build the body of an answer."""
    chat = asked.messages is not None
    completion_tokens = sum(len(response.token_ids) for response in responses)
    return {
        "id": name,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(index, asked, response) for index, response in enumerate(responses)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _choice(index: int, asked: EndpointRequest, response: Trajectory) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": _FINISHED[response.stop_reason], "logprobs": None}
    if asked.messages is None:
        choice["text"] = response.text
        if asked.with_logprobs:
            choice["logprobs"] = {"token_ids": list(response.token_ids), "token_logprobs": list(response.logprobs)}
        return choice
    message = assistant_message(response.text, response.sample_id, with_tools=bool(asked.tools))
    if "tool_calls" in message:
        choice["finish_reason"] = "tool_calls"
    choice["message"] = message
    if asked.with_logprobs:
        pairs = zip(response.token_ids, response.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        }
    return choice
