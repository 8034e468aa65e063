"""What a client asks for, in the words of OpenAI's API, and what it is answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.tool_calls import tool_calls
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

# What changes nothing about a response here, or nothing that is not told by the answer.
_HARMLESS = {
    "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "user", "metadata", "store",
    "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# What would change it, unless it has this value.
_NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "echo": False, "best_of": 1, "suffix": None, "seed": None,
    "response_format": {"type": "text"},
}  # fmt: skip
_MOST_ANSWERS = 64


class Refused(Exception):
    """The request cannot be answered: a sentence for the client, and the status."""

    def __init__(self, what: str, status: int = 400):
        super().__init__(what)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be answered."""

    messages: Sequence[Mapping[str, Any]] | None  # None: ``prompt`` counts
    prompt: str | tuple[int, ...] = ""  # text, or token ids
    tools: Sequence[Mapping[str, Any]] = ()
    answers: int = 1
    max_tokens: int
    stream: bool = False
    with_logprobs: bool = False


def read(body: Any, sampling: SamplingParams, *, chat: bool, any_sampling: bool) -> Asked:
    """Raises: Refused with everything that is wrong."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    problems = list(_sampling_problems(body, sampling)) if not any_sampling else []
    for name, value in body.items():
        if name in _NEUTRAL and value not in (None, _NEUTRAL[name]):
            problems.append(f"{name}={json.dumps(value)[:60]} is not supported")
        elif name not in _HARMLESS and name not in _NEUTRAL:
            problems.append(f"{name} is not known")
    most = sampling.max_response_tokens
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or most
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or not 1 <= max_tokens <= most:
        problems.append(f"max_tokens is {json.dumps(max_tokens)}; use 1 to {most} (rollout.max_response_tokens)")
    answers = body.get("n") or 1
    if not isinstance(answers, int) or isinstance(answers, bool) or not 1 <= answers <= _MOST_ANSWERS:
        problems.append(f"n is {json.dumps(answers)}; use 1 to {_MOST_ANSWERS}")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problems.append("tools must be a list of functions")
    if body.get("tool_choice") not in (None, "auto", *(() if tools else ("none",))):
        problems.append("tool_choice must be auto: the model chooses")
    messages: list[dict[str, Any]] | None = None
    prompt: str | tuple[int, ...] = ""
    try:
        if chat:
            messages = _messages(body.get("messages"))
        else:
            prompt = _prompt(body.get("prompt"))
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        raise Refused("; ".join(problems))
    logprobs = body.get("logprobs")
    return Asked(
        messages=messages,
        prompt=prompt,
        tools=tools,
        answers=answers,
        max_tokens=max_tokens,
        stream=bool(body.get("stream")),
        with_logprobs=logprobs is not None and logprobs is not False,
    )


def _sampling_problems(body: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """All responses are drawn in one way, that of the run: their log-probs are of that distribution."""
    problems = []
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        asked = body.get(name)
        if asked is not None and asked != ours:
            problems.append(
                f"{name} is {json.dumps(asked)}, and this endpoint samples with {ours:g} (rollout.{name}); leave it out, or "
                "start it with endpoint.any_sampling=true"
            )
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if any(one not in sampling.stop for one in stop):
        problems.append(
            f"stop is {json.dumps(stop)[:60]}, and this endpoint stops at {list(sampling.stop)} (rollout.stop)"
        )
    return problems


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of at least one message")
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, given: Any) -> dict[str, Any]:
    """A message as chat templates read it: content as text, arguments of tool calls as objects."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(f"messages[{number}] must be an object with a role")
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(f"messages[{number}].content holds a part that is no text")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"messages[{number}].content must be text")
    message = {**given, "content": content or ""}
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in calls
            ]
        except (TypeError, KeyError, ValueError, RecursionError):
            raise Refused(f"messages[{number}].tool_calls are not calls with arguments in JSON") from None
    return message


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
    name: str, model: str, created: int, asked: Asked, prompt_tokens: int, responses: Sequence[Trajectory]
) -> dict[str, Any]:
    """The body of an answer."""
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


def as_events(whole: Mapping[str, Any]) -> list[str]:
    """The same as a stream of server-sent events: each choice at once, for that is how responses come."""
    chat = whole["object"] == "chat.completion"
    common = {name: whole[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if chat else "text_completion"
    events = []
    for choice in whole["choices"]:
        piece = dict(choice)
        if chat:
            message = dict(piece.pop("message"))
            if "tool_calls" in message:
                message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
            piece["delta"] = message
        events.append({**common, "choices": [piece]})
    events.append({**common, "choices": [], "usage": whole["usage"]})
    return [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]


def _choice(index: int, asked: Asked, response: Trajectory) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": _FINISHED[response.stop_reason], "logprobs": None}
    if asked.messages is None:
        choice["text"] = response.text
        if asked.with_logprobs:
            choice["logprobs"] = {"token_ids": list(response.token_ids), "token_logprobs": list(response.logprobs)}
        return choice
    message: dict[str, Any] = {"role": "assistant", "content": response.text}
    calls = [call for call in tool_calls(response.text) if not call.problem] if asked.tools else []
    if calls:
        message["content"] = response.text.partition("<tool_call>")[0].strip() or None
        message["tool_calls"] = [
            {
                "id": f"call_{response.sample_id}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
        choice["finish_reason"] = "tool_calls"
    choice["message"] = message
    if asked.with_logprobs:
        pairs = zip(response.token_ids, response.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        }
    return choice
