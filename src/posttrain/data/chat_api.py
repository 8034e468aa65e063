"""The words of OpenAI's chat completions: what a client asks with, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.data.tool_calls import tool_calls
from posttrain.interfaces.env import Message
from posttrain.libraries import json_text

# What changes nothing about a response here, or nothing that is not told by the answer.
HARMLESS = {
    "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "user", "metadata", "store",
    "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# What would change it, unless it has this value.
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "echo": False, "best_of": 1, "suffix": None, "seed": None,
    "response_format": {"type": "text"},
}  # fmt: skip


class Refused(Exception):
    """The request cannot be answered: a sentence for the client, and the status."""

    def __init__(self, what: str, status: int = 400):
        super().__init__(what)
        self.status = status


def word_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Words that nobody knows, or that ask for something which is not done."""
    for name, value in body.items():
        if name in NEUTRAL and value not in (None, NEUTRAL[name]):
            yield f"{name}={json.dumps(value)[:60]} is not supported"
        elif name not in HARMLESS and name not in NEUTRAL:
            yield f"{name} is not known"


def tool_problems(body: Mapping[str, Any]) -> Iterator[str]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        yield "tools must be a list of functions"
    if body.get("tool_choice") not in (None, "auto", *(() if tools else ("none",))):
        yield "tool_choice must be auto: the model chooses"


def is_count(value: Any, most: float = float("inf")) -> bool:
    """Whether it is a whole number from 1 to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as text, arguments of tool calls as objects. Raises: Refused."""
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of at least one message")
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, given: Any) -> dict[str, Any]:
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
                {**call, "function": {**call["function"], "arguments": json_text.loads(call["function"]["arguments"])}}
                for call in calls
            ]
        except (TypeError, KeyError, ValueError, RecursionError):
            raise Refused(f"messages[{number}].tool_calls are not calls with arguments in JSON") from None
    return message


def message_told(text: str, name: str, *, with_tools: bool) -> dict[str, Any]:
    """The assistant's message for what the model wrote. ``name``, of the response, makes the calls' ids; ``with_tools``: calls
    are looked for, as the client has offered tools."""
    calls = [call for call in tool_calls(text) if not call.problem] if with_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition("<tool_call>")[0].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{name}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ],
    }


def same_answer(said: Message, told: Message) -> bool:
    """Whether a client has sent back (as ``messages_of`` reads it) the message that it was told."""
    ours = [
        (call["function"]["name"], json_text.loads(call["function"]["arguments"]))
        for call in told.get("tool_calls") or ()
    ]
    functions = [call.get("function", {}) for call in said.get("tool_calls") or ()]
    return (
        said.get("role") == "assistant"
        and (said.get("content") or "") == (told.get("content") or "")
        and [(function.get("name"), function.get("arguments")) for function in functions] == ours
    )


def behind(before: Sequence[Message], told: Message, messages: Sequence[Message]) -> Sequence[Message] | None:
    """What a request adds to an earlier one and its answer; None where it does not begin with them, or adds nothing."""
    seen = len(before)
    goes_on = len(messages) > seen + 1 and list(messages[:seen]) == list(before) and same_answer(messages[seen], told)
    return messages[seen + 1 :] if goes_on else None


def as_events(whole: Mapping[str, Any]) -> list[str]:
    """An answer as a stream of server-sent events: each choice at once, for that is how responses come."""
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


def error_body(message: str, status: int) -> dict[str, Any]:
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
