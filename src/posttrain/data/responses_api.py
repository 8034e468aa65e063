"""OpenAI's responses API, in terms of chat completions. Nothing is stored: a client sends the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posttrain.data.chat_api import Refused

# Parameters with the same meaning in chat completions.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "tool_choice",
    "parallel_tool_calls",
    "seed",
    "stop",
)
# Parameters without an effect on a response here.
_HARMLESS = {"store", "include", "truncation", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning"}
_NEUTRAL: dict[str, Any] = {
    "previous_response_id": None, "background": False, "prompt": None, "conversation": None, "max_tool_calls": None,
    "top_logprobs": 0,
}  # fmt: skip


def as_chat(body: Any) -> dict[str, Any]:
    """Convert a request to one for a chat completion. Raises: Refused."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    problems = [
        f"{name}={json.dumps(value)[:60]} is not supported"
        for name, value in body.items()
        if name in _NEUTRAL and value not in (None, _NEUTRAL[name])
    ]
    known = {*_SAME, *_HARMLESS, *_NEUTRAL, "input", "instructions", "max_output_tokens", "tools", "text"}
    problems += [f"{name} is not known" for name in body if name not in known]
    form = (body.get("text") or {}).get("format") if isinstance(body.get("text") or {}, dict) else "?"
    if form not in (None, {"type": "text"}):
        problems.append("text.format is not supported")
    if problems:
        raise Refused("; ".join(problems))
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    first = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**chat, "messages": [*first, *_messages(body.get("input"))]}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused("tools must be functions: this endpoint runs none of its own")
    kept = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused("input must be a text, or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise Refused(f"input[{place}] must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise Refused(f"input[{place}] is of type {kind!r}; use message, function_call or function_call_output")
    return messages


def as_response(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a response."""
    [choice] = whole["choices"]
    message, usage = choice["message"], whole["usage"]
    cut = choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{whole['id']}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    for call in message.get("tool_calls") or ():
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
            }
        )
    kept = {name: whole[name] for name in ("conversation", "policy_version") if name in whole}
    return {
        "id": f"resp_{whole['id']}",
        "object": "response",
        "created_at": whole["created"],
        "model": whole["model"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        **kept,
    }


def as_response_events(response: Mapping[str, Any]) -> list[str]:
    """Format a response as a stream of server-sent events, with each item in one piece."""
    begun = {**response, "status": "in_progress", "output": []}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for place, item in enumerate(response["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        events.append(
            {"type": "response.output_item.added", "output_index": place, "item": {**item, "status": "in_progress"}}
        )
        if item["type"] == "message":
            text = item["content"][0]["text"]
            events.append(
                {"type": "response.output_text.delta", **at, "content_index": 0, "delta": text, "logprobs": []}
            )
            events.append({"type": "response.output_text.done", **at, "content_index": 0, "text": text, "logprobs": []})
        else:
            arguments = item["arguments"]
            events.append({"type": "response.function_call_arguments.delta", **at, "delta": arguments})
            events.append(
                {"type": "response.function_call_arguments.done", **at, "arguments": arguments, "name": item["name"]}
            )
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered]
