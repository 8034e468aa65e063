"""Answers as streams of server-sent events, piece by piece: of chat completions, completions and the responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from posttrain.data.chat_api import error_body
from posttrain.data.responses_api import as_response, function_item, reasoning_item, text_item

Json = Mapping[str, Any]


class AnswerEvents(Protocol):
    """Formats one answer. A choice is ``piece`` any number of times and then ``finished``; ``end`` comes last."""

    def piece(self, index: int, text: str, logprobs: Json | None = None, reasoning: str = "") -> Iterator[str]:
        """Further text of a choice, thoughts before it, and the log-probs of its tokens where they are requested."""
        ...

    def finished(self, choice: Json, rest: str, logprobs: Json | None = None) -> Iterator[str]:
        """A whole choice. ``rest`` and ``logprobs``: what was not in pieces."""
        ...

    def end(self, whole: Json) -> Iterator[str]:
        """The end of the whole answer, as it is without a stream."""
        ...


def failed(message: str, status: int) -> str:
    """An error after the stream has begun."""
    return f"data: {json.dumps(error_body(message, status))}\n\n"


class CompletionEvents:
    """See AnswerEvents. Of chat completions (``chat``) or completions.

    Args: head, the fields that all events share: id, created, model; with_usage, whether an event with the usage comes last
        (stream_options.include_usage).
    """

    def __init__(self, head: Json, *, chat: bool, with_usage: bool):
        self._chat = chat
        self._head = {**head, "object": "chat.completion.chunk" if chat else "text_completion"}
        self._with_usage = with_usage
        self._begun: set[int] = set()

    def piece(self, index: int, text: str, logprobs: Json | None = None, reasoning: str = "") -> Iterator[str]:
        if reasoning:
            yield self._choice(index, {"reasoning_content": reasoning}, None if text else logprobs, None)
        if text or (logprobs and not reasoning):
            yield self._choice(index, {"content": text} if self._chat else {"text": text}, logprobs, None)

    def finished(self, choice: Json, rest: str, logprobs: Json | None = None) -> Iterator[str]:
        if not self._chat:
            yield self._choice(choice["index"], {"text": rest}, logprobs, choice["finish_reason"])
            return
        delta: dict[str, Any] = {"content": rest} if rest or choice["index"] not in self._begun else {}
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
            delta |= {"content": rest or None} if "content" in delta else {}
        yield self._choice(choice["index"], delta, logprobs, choice["finish_reason"])

    def end(self, whole: Json) -> Iterator[str]:
        if self._with_usage:
            yield _event({**self._head, "choices": [], "usage": whole["usage"]})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, said: dict[str, Any], logprobs: Json | None, finish_reason: str | None) -> str:
        if self._chat:
            said = {"delta": said if index in self._begun else {"role": "assistant", **said}}
        self._begun.add(index)
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**self._head, "choices": [choice]})


class ResponseEvents:
    """See AnswerEvents. Of the responses API, whose answers have one choice.

    Args: head, as CompletionEvents.
    """

    def __init__(self, head: Json):
        self._head = head
        self._number = 0
        self._text: str | None = None  # of the message so far; None: it has not begun
        self._thoughts: str | None = None  # before it, in the same way
        self._thinking = False

    def piece(self, index: int, text: str, logprobs: Json | None = None, reasoning: str = "") -> Iterator[str]:
        if reasoning:
            yield from self._think(reasoning)
        if not text:
            return
        yield from self._end_thoughts()
        if self._text is None:
            yield from self._begin_message()
        self._text = (self._text or "") + text
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def finished(self, choice: Json, rest: str, logprobs: Json | None = None) -> Iterator[str]:
        yield from self.piece(choice["index"], rest)
        yield from self._end_thoughts()
        if self._number == 0:
            yield from self._begin()
        if self._text is not None:
            item = text_item(self._head["id"], self._text)
            yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=item["content"][0])
            yield self._event("response.output_item.done", output_index=self._first, item=item)
        first = self._first + (self._text is not None)
        for place, call in enumerate(choice["message"].get("tool_calls") or (), first):
            yield from self._called(place, function_item(call))

    def end(self, whole: Json) -> Iterator[str]:
        response = as_response(whole)
        yield self._event(f"response.{response['status']}", response=response)

    def _begin(self) -> Iterator[str]:
        nothing = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choice = {"finish_reason": "", "message": {}}
        response = as_response({**self._head, "choices": [choice], "usage": nothing}) | {"usage": None}
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response={**response, "status": "in_progress"})

    def _begin_message(self) -> Iterator[str]:
        if self._number == 0:
            yield from self._begin()
        item = text_item(self._head["id"], "")
        empty = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=self._first, item=empty)
        yield self._event("response.content_part.added", **self._place(), part=item["content"][0])

    @property
    def _first(self) -> int:
        """The place of the message among the items of the output."""
        return 0 if self._thoughts is None else 1

    def _think(self, text: str) -> Iterator[str]:
        if self._thoughts is None:
            yield from self._begin()
            item = {**reasoning_item(self._head["id"], ""), "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            self._thinking = True
        self._thoughts = (self._thoughts or "") + text
        yield self._event("response.reasoning_text.delta", **self._place_of_thoughts(), delta=text)

    def _end_thoughts(self) -> Iterator[str]:
        if not self._thinking:
            return
        self._thinking, text = False, self._thoughts or ""
        yield self._event("response.reasoning_text.done", **self._place_of_thoughts(), text=text)
        item = reasoning_item(self._head["id"], text)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _place_of_thoughts(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": reasoning_item(self._head["id"], "")["id"], "content_index": 0}

    def _called(self, place: int, item: Json) -> Iterator[str]:
        at = {"output_index": place, "item_id": item["id"]}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        arguments = item["arguments"]
        yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
        yield self._event("response.function_call_arguments.done", **at, arguments=arguments, name=item["name"])
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": self._first, "item_id": text_item(self._head["id"], "")["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        event = {"type": kind, **fields, "sequence_number": self._number - 1}
        return f"event: {kind}\n{_event(event)}"


def events_of(head: Json, *, chat: bool, as_items: bool, with_usage: bool) -> AnswerEvents:
    """Return the events of an answer; ``as_items``, of the responses API."""
    return ResponseEvents(head) if as_items else CompletionEvents(head, chat=chat, with_usage=with_usage)


def in_one_piece(whole: Json, events: AnswerEvents) -> Iterator[str]:
    """Format an answer that is complete already."""
    for choice in whole["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if "message" in choice:
            yield from events.piece(choice["index"], "", None, choice["message"].get("reasoning_content", ""))
        yield from events.finished(choice, text or "", choice["logprobs"])
    yield from events.end(whole)


def _event(event: Json) -> str:
    return f"data: {json.dumps(event)}\n\n"
