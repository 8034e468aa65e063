"""OpenAI's responses API, in terms of chat completions. Nothing is stored: a client sends the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
_HARMLESS = {"store", "include", "service_tier", "safety_identifier", "prompt_cache_key"}
_LOGPROBS = "message.output_text.logprobs"  # in ``include``
_NEUTRAL: dict[str, Any] = {
    "previous_response_id": None, "background": False, "prompt": None, "conversation": None, "max_tool_calls": None,
    "truncation": "disabled",
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
    known = {
        *_SAME,
        *_HARMLESS,
        *_NEUTRAL,
        "reasoning",
        "input",
        "instructions",
        "max_output_tokens",
        "tools",
        "text",
        "top_logprobs",
    }
    problems += [f"{name} is not known" for name in body if name not in known]
    text = body.get("text") or {}
    if not isinstance(text, dict) or set(text) - {"format", "verbosity"}:
        problems.append("text must be an object with a format")
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        problems.append(f"reasoning is {json.dumps(reasoning)[:60]}; use an object")
    elif reasoning and reasoning.get("effort") is not None:
        problems.append(f"reasoning.effort={json.dumps(reasoning['effort'])[:60]} is not supported")
    include = body.get("include")
    if include is not None and not (isinstance(include, list) and all(isinstance(one, str) for one in include)):
        problems.append(f"include is {json.dumps(include)[:60]}; use a list of texts")
    if problems:
        raise Refused("; ".join(problems))
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("top_logprobs") or _LOGPROBS in (body.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    if (form := text.get("format")) is not None:
        chat["response_format"] = _response_format(form)
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    first = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**chat, "messages": [*first, *_messages(body.get("input"))]}


def _response_format(form: Any) -> Any:
    """Return ``text.format`` as chat completions have it."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


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


def text_item(answer_id: str, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The message of an answer, given by the id of its chat completion."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {
        "type": "message",
        "id": f"msg_{answer_id}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def reasoning_item(answer_id: str, text: str) -> dict[str, Any]:
    """The thoughts of an answer, given by the id of its chat completion."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": content, "status": "completed"}


def function_item(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a chat completion."""
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "status": "completed",
        **call["function"],
    }


def as_response(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a response."""
    [choice] = whole["choices"]
    message, usage = choice["message"], whole["usage"]
    cut = choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        output.append(reasoning_item(whole["id"], message["reasoning_content"]))
    if message.get("content"):
        found = (choice.get("logprobs") or {}).get("content") or ()
        output.append(text_item(whole["id"], message["content"], found))
    output += [function_item(call) for call in message.get("tool_calls") or ()]
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
