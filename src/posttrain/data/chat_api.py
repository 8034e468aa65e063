"""Parsing and building of messages of OpenAI's chat completions API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.data.tool_forms import calls_of, schemas_of, text_before_calls
from posttrain.data.tool_forms.channels import has_channels, said_in
from posttrain.interfaces.env import Message
from posttrain.libraries import json_text

# Parameters without an effect on a response here, or whose effect shows in the answer.
HARMLESS = {
    "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "user", "metadata", "store",
    "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
# Parameters that would change the response, unless they have this value.
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "echo": False, "best_of": 1, "suffix": None, "seed": None,
    "response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "prediction": None, "web_search_options": None,
    "functions": None, "function_call": None, "reasoning_effort": None, "verbosity": "medium", "min_p": 0,
    "repetition_penalty": 1,
}  # fmt: skip


BOOLEANS = {"stream", "parallel_tool_calls"}
ROLES = ("system", "user", "assistant", "tool")


class Refused(Exception):
    """The request is rejected; the message is for the client, with the HTTP status."""

    def __init__(self, what: str, status: int = 400):
        super().__init__(what)
        self.status = status


def word_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for every unknown parameter, and for values that are not supported."""
    options = body.get("stream_options")
    if options is not None and (
        not isinstance(options, Mapping)
        or options.get("include_usage") not in (None, True, False)
        or set(options) - {"include_usage", "include_obfuscation"}
    ):
        yield f'stream_options is {json.dumps(options)[:60]}; use {{"include_usage": true}}'
    for name, value in body.items():
        if name in NEUTRAL and value not in (None, NEUTRAL[name]):
            yield f"{name}={json.dumps(value)[:60]} is not supported"
        elif name not in HARMLESS and name not in NEUTRAL:
            yield f"{name} is not known"
        elif name in BOOLEANS and value not in (None, True, False):
            yield f"{name} is {json.dumps(value)[:60]}; use true or false"


def check_framing(lengths: Sequence[str], codings: Sequence[str]) -> None:
    """Check how a request says where its body ends; a server that refuses it must close the connection.

    Args: the values of its headers Content-Length and Transfer-Encoding. Source: RFC 9112, section 6.3.
    Raises: Refused for several lengths that differ, and for a length beside a coding: two readers may find different ends.
    """
    if lengths and codings:
        raise Refused("Content-Length and Transfer-Encoding are both given; send one of them")
    if len({each.strip() for value in lengths for each in value.split(",")}) > 1:
        raise Refused(f"Content-Length is given as {', '.join(lengths)[:60]}; send one length")


def check_model(body: Mapping[str, Any], name: str) -> None:
    """Raises: Refused when a request names another model than the one that answers."""
    if body.get("model") not in (None, "", name):
        raise Refused(f"there is no model {json.dumps(body['model'])[:60]}; this endpoint has {name}", 404)


def tool_problems(body: Mapping[str, Any]) -> Iterator[str]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        yield "tools must be a list of functions"
        return
    for place, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield f"tools[{place}] is no function with a name"
            return
        if not isinstance(function.get("parameters") or {}, dict):
            yield f"tools[{place}].parameters must be an object, a JSON schema"
        elif not isinstance(function.get("description") or "", str):
            yield f"tools[{place}].description must be a text"
    yield from _choice_problems(body.get("tool_choice"), [tool.get("function", tool).get("name") for tool in tools])


def _choice_problems(choice: Any, names: Sequence[str]) -> Iterator[str]:
    shown = f"tool_choice is {json.dumps(choice)[:60]}"
    if choice in (None, "auto", "none"):
        return
    if choice == "required":
        if not names:
            yield f"{shown}, and there are no tools"
        return
    name = chosen_tool(choice)
    if name is None:
        named = '{"type": "function", "function": {"name": ...}}'
        yield f"{shown}; use auto (the model chooses), none (no tools are offered), required, or {named}"
    elif name not in names:
        yield f"{shown}, and the tools are {', '.join(json.dumps(each)[:60] for each in names[:5]) or 'none'}"


def chosen_tool(choice: Any) -> str | None:
    """Return the name of the one tool that a ``tool_choice`` names; None where it names none."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)  # the responses API has the name beside the type
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def must_call(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a request without problems of which its answer must call one; (): it may do without."""
    choice, tools = body.get("tool_choice"), body.get("tools") or ()
    if choice == "required":
        return tuple(tools)
    name = chosen_tool(choice)
    return () if name is None else tuple(tool for tool in tools if tool.get("function", tool).get("name") == name)[:1]


def tools_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a request without problems that the model may call."""
    tools: Sequence[Mapping[str, Any]] = body.get("tools") or ()
    return () if body.get("tool_choice") == "none" else tools


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return True when a stream is to end with the usage."""
    options = body.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True


def is_count(value: Any, most: float = float("inf")) -> bool:
    """Return True for a whole number from 1 to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Convert messages to the form of chat templates: content as text, arguments of tool calls as objects. Raises: Refused."""
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of at least one message")
    messages = [_message(number, message) for number, message in enumerate(given)]
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            _check_answer_of_tool(number, messages)
    return messages


def _check_answer_of_tool(number: int, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises: Refused for an answer of a tool that no call of the assistant's asked for."""
    before = next((each for each in reversed(messages[:number]) if each["role"] != "tool"), None)
    if before is None or before["role"] != "assistant":
        raise Refused(f"messages[{number}] is the answer of a tool, and no message of the assistant is before it")
    asked = [call.get("id") for call in before.get("tool_calls") or ()]
    name = messages[number].get("tool_call_id")
    if name is not None and asked and None not in asked and name not in asked:
        raise Refused(
            f"messages[{number}].tool_call_id is {json.dumps(name)[:60]}, and the calls before it are "
            f"{', '.join(json.dumps(each)[:60] for each in asked[:5])}"
        )


def _message(number: int, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(f"messages[{number}] must be an object with a role")
    # Templates know no developer.
    role = "system" if given["role"] == "developer" else given["role"]
    if role not in ROLES:
        raise Refused(f"messages[{number}].role is {json.dumps(role)[:60]}; use {', '.join(ROLES)} or developer")
    content = given.get("content")
    if content is None and role != "assistant":
        raise Refused(f"messages[{number}].content is missing")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            kinds = [part.get("type") for part in content if isinstance(part, dict) and "text" not in part]
            named = f" ({', '.join(map(str, kinds))[:60]})" if kinds else ""
            raise Refused(
                f"messages[{number}].content holds a part that is not text{named}; this endpoint reads text only"
            )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"messages[{number}].content must be text")
    message = {**given, "role": role, "content": content or ""}
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json_text.loads(call["function"]["arguments"])}}
                for call in calls
            ]
            if not all(isinstance(call["function"]["name"], str) for call in calls):
                raise TypeError
        except (TypeError, KeyError, ValueError, RecursionError):
            raise Refused(f"messages[{number}].tool_calls are not calls with a name and arguments in JSON") from None
    return message


def assistant_message(text: str, name: str, *, tools: Sequence[Mapping[str, Any]], form: str) -> dict[str, Any]:
    """Build the assistant's message from the model's text. ``name`` (of the response) makes the ids of its calls, unless the
    model wrote them; where tools were offered, the calls are parsed in the ``form`` of the model."""
    calls = [call for call in calls_of(form, text, schemas_of(tools)) if not call.problem] if tools else []
    content, reasoning = said_in(form, text, calls=bool(calls))
    thoughts = {"reasoning_content": reasoning} if reasoning else {}
    if not calls:
        return {"role": "assistant", "content": content, **thoughts}
    return {
        "role": "assistant",
        "content": (content if has_channels(form) else text_before_calls(form, text)).rstrip() or None,
        **thoughts,
        "tool_calls": [
            {
                "id": call.call_id or f"call_{name}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ],
    }


def same_message(sent: Message, received: Message) -> bool:
    """Return True when a message sent back by the client (as ``messages_of`` returns it) is the one it received."""
    ours = [
        (call["function"]["name"], json_text.loads(call["function"]["arguments"]))
        for call in received.get("tool_calls") or ()
    ]
    functions = [call.get("function", {}) for call in sent.get("tool_calls") or ()]
    return (
        sent.get("role") == "assistant"
        and (sent.get("content") or "") == (received.get("content") or "")
        and [(function.get("name"), function.get("arguments")) for function in functions] == ours
    )


def added_messages(before: Sequence[Message], answer: Message, messages: Sequence[Message]) -> Sequence[Message] | None:
    """Return the messages that a request adds to an earlier one and its answer; None when it adds none or is no extension."""
    seen = len(before)
    extends = (
        len(messages) > seen + 1 and list(messages[:seen]) == list(before) and same_message(messages[seen], answer)
    )
    return messages[seen + 1 :] if extends else None


def content_of(message: Message) -> str:
    """Return the text of a message; of a list of parts, the texts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def error_body(message: str, status: int) -> dict[str, Any]:
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
