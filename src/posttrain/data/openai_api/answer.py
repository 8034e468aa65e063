"""Answers of OpenAI's API: choices, log-probs and usage, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import assistant_message
from posttrain.data.openai_api.own_sampling import before_stop
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.data.stream_events import AnswerEvents
from posttrain.data.text_pieces import TextPieces
from posttrain.data.tool_forms import DEFAULT, openings_of
from posttrain.data.tool_forms.channels import Said, SaidPieces, has_channels
from posttrain.records.trajectories import StopReason, Trajectory, Unfinished


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that answers begin with."""

    text: str
    token_ids: tuple[int, ...]


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


class LiveAnswer:
    """The events of an answer while its choices are sampled.

    Args: echoes, the text that each choice begins with, where the request asks for its prompt; otherwise as ``answer``.
    """

    def __init__(
        self,
        events: AnswerEvents,
        asked: EndpointRequest,
        choices: int,
        *,
        form: str,
        decode: Callable[[Sequence[int]], str],
        text_of: Callable[[int], str],
        echoes: Sequence[str] = (),
    ):
        opening = openings_of(form) if asked.tools else ()
        split = asked.messages is not None and has_channels(form)
        self._parts = [SaidPieces(form, decode, stops=asked.stop) for _ in range(choices if split else 0)]
        self._pieces = [TextPieces(decode, stops=asked.stop, opening=opening) for _ in range(choices)]
        self._sent = [0] * choices  # tokens of each choice whose log-probs were sent
        self._events, self._asked, self._form, self._text_of, self._echoes = events, asked, form, text_of, echoes

    def begin(self) -> Iterator[str]:
        for place, text in enumerate(self._echoes):
            yield from self._events.piece(place, text)

    def grown(self, place: int, progress: Unfinished) -> Iterator[str]:
        """Take further tokens of a choice."""
        self._sent[place] += len(progress.token_ids)
        logprobs = logprobs_of(self._asked, progress, self._text_of)
        if self._parts:
            content, reasoning = self._parts[place].add(progress.token_ids)
            yield from self._events.piece(place, content, logprobs, reasoning)
        else:
            yield from self._events.piece(place, self._pieces[place].add(progress.token_ids), logprobs)

    def ended(self, place: int, response: Trajectory) -> Iterator[str]:
        """Take a whole choice."""
        choice = choice_of(place, self._asked, response, self._form, self._text_of)
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        logprobs = logprobs_of(self._asked, response, self._text_of, self._sent[place])
        if self._parts:
            said = Said(text or "", choice["message"].get("reasoning_content", ""))
            content, reasoning = self._parts[place].rest(said)
            yield from self._events.piece(place, "", None, reasoning)
            yield from self._events.finished(choice, content, logprobs)
        else:
            yield from self._events.finished(choice, self._pieces[place].rest(text or ""), logprobs)

    def end(self, whole: Mapping[str, Any]) -> Iterator[str]:
        """End with the whole answer, as it is without a stream."""
        yield from self._events.end(whole)
