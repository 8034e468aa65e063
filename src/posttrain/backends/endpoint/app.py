"""The HTTP routes: /v1/models, /v1/chat/completions, /v1/completions. The sole importer of starlette."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from posttrain.backends.endpoint.body import read_body
from posttrain.backends.endpoint.driver import Closed, Driver
from posttrain.backends.endpoint.record import Record
from posttrain.backends.endpoint.sampling import Asking, Sampling
from posttrain.backends.endpoint.sessions import Sessions, SessionTurn
from posttrain.data.chat_api import Refused, check_model, error_body
from posttrain.data.openai_api.answer import EchoedPrompt, LiveAnswer, answer, shown_text
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.openai_api.request import EndpointRequest, read
from posttrain.data.raw_prompts import raw_prompt_ids
from posttrain.data.responses_api import as_chat, as_response
from posttrain.data.stream_events import AnswerEvents, events_of, failed, in_one_piece
from posttrain.data.tool_forms import DEFAULT
from posttrain.data.turns import TemplateTurns
from posttrain.errors import RequestError
from posttrain.libraries import json_text
from posttrain.libraries.http_host import names_this_machine
from posttrain.records.trajectories import GRAMMAR, SamplingParams, StopReason, Trajectory, Unfinished

# Bytes of a body: enough for max_prompt_tokens of text in JSON, so that nothing much longer is tokenized to be refused.
_SMALLEST_LIMIT, _LARGEST_LIMIT, _BYTES_PER_TOKEN = 1 << 20, 16 << 20, 64
BODY_S = 60.0  # for the body of a request
LOOK_S = 1.0  # between two checks that the client is still connected


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlan:
    """Settings of an endpoint, in plain values."""

    model: str  # name in answers
    token: str
    sampling: SamplingParams
    max_prompt_tokens: int
    honours: Honours
    streams: bool = False  # the sampler reports the tokens of a response while it is sampled
    session_header: str
    max_sessions: int
    tool_call_form: str = DEFAULT
    host_names: frozenset[str] = frozenset({"localhost"})  # by which clients may call this machine, beside addresses


class Endpoint:
    """Answers requests on one event loop, with responses sampled by a driver."""

    def __init__(
        self,
        plan: EndpointPlan,
        driver: Driver,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, Any],
        record: Record | None,
    ):
        self._plan = plan
        self._driver = driver
        self._writer = TemplateTurns(tokenizer, options, form=plan.tool_call_form)
        self._tokenizer = tokenizer
        self._sessions = Sessions(self._writer, plan.max_sessions)
        self._record = record
        self._numbers = itertools.count()
        self._tokenizing = threading.Lock()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
            ],
            exception_handlers={404: _unknown, 405: _unknown},
        )

    @property
    def plan(self) -> EndpointPlan:
        return self._plan

    async def health(self, http: HttpRequest) -> Response:
        """Report health. Needs no token."""
        if refusal := self.wrong_host(http):
            return refusal
        return JSONResponse({"ok": self._driver.alive}, 200 if self._driver.alive else 503)

    async def models(self, http: HttpRequest) -> Response:
        if refusal := self.refusal(http):
            return refusal
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, http: HttpRequest) -> Response:
        if refusal := self.refusal(http):
            return refusal
        try:
            check_model({"model": http.path_params["name"]}, self._plan.model)
        except Refused as refused:
            return _error(str(refused), refused.status)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._plan.model, "object": "model", "created": 0, "owned_by": "posttrain"}

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answered(http, chat=True)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answered(http, chat=False)

    async def responses(self, http: HttpRequest) -> Response:
        return await self._answered(http, chat=True, as_items=True)

    async def _answered(self, http: HttpRequest, *, chat: bool, as_items: bool = False) -> Response:
        """Answer a request; ``as_items``, of the responses API."""
        if refusal := self.refusal(http):
            return refusal
        try:
            body = await _body(http, self._largest_body)
            body = as_chat(body) if as_items else body
            asked = await asyncio.to_thread(self._read, body, chat)
            check_model(body, self._plan.model)
            return await self._sampled(http, asked, as_items=as_items)
        except Refused as refused:
            return _error(str(refused), refused.status)
        except RequestError as error:  # the chat template rejects the messages
            return _error(str(error), 400)
        except Closed:
            return _error("the endpoint is closing", 503)

    def _read(self, body: Any, chat: bool) -> EndpointRequest:
        """Parse a request, in another thread than the event loop's: the grammar of a large schema takes a while."""
        plan = self._plan
        return read(body, plan.sampling, chat=chat, honours=plan.honours, form=plan.tool_call_form)

    @property
    def _largest_body(self) -> int:
        return min(max(_SMALLEST_LIMIT, _BYTES_PER_TOKEN * self._plan.max_prompt_tokens), _LARGEST_LIMIT)

    def wrong_host(self, http: HttpRequest) -> Response | None:
        """The answer to a request that calls this machine by another name; None where the name is right."""
        if names_this_machine(http.headers.get("host", ""), self._plan.host_names):
            return None
        return _error("this endpoint has another host name (endpoint.host_names adds one)", 421)

    def refusal(self, http: HttpRequest) -> Response | None:
        """The answer to a request of a wrong host name or token; None where both are right."""
        if wrong := self.wrong_host(http):
            return wrong
        given = http.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._plan.token}".encode()):
            return None
        return _error("the bearer token is missing or wrong (Authorization: Bearer TOKEN)", 401)

    async def _sampled(self, http: HttpRequest, asked: EndpointRequest, *, as_items: bool) -> Response:
        number = next(self._numbers)
        session = http.headers.get(self._plan.session_header, "")
        prompts, continues = await asyncio.to_thread(self._tokens, session, asked)
        room = self._plan.max_prompt_tokens
        longest = max(map(len, prompts))
        if longest > room:
            raise Refused(f"the prompt has {longest} tokens, and {room} are allowed (data.max_prompt_tokens)")
        asking = Asking(
            name=f"{session or 'request'}-{number}",
            session=session,
            asked=asked,
            prompts=prompts,
            continues=continues,
            created=time.time(),
        )
        live = asked.stream and self._plan.streams and asked.max_tokens > 0 and not (asked.echo and asked.with_logprobs)
        sampling = Sampling(self._driver, asking.requests(), watched=live)
        try:
            while not sampling.begun(live):
                await sampling.change(LOOK_S)
                if not sampling.begun(live) and await http.is_disconnected():
                    raise Refused("the client has left", 499)
            events = self._events(asking, as_items) if asked.stream else None
            if not live:
                whole = self._told(asking, sampling.responses())
                if events is not None:
                    return _streamed(in_one_piece(whole, events))
                return JSONResponse(as_response(whole) if as_items else whole)
            for response in sampling.ended():
                self._checked(response)
        except BaseException:
            sampling.give_up()
            raise
        assert events is not None
        return _streamed(self._live(asking, sampling, events))

    def _events(self, asking: Asking, as_items: bool) -> AnswerEvents:
        asked = asking.asked
        head = {"id": asking.name, "created": int(asking.created), "model": self._plan.model}
        return events_of(head, chat=asked.messages is not None, as_items=as_items, with_usage=asked.with_usage)

    async def _live(self, asking: Asking, sampling: Sampling, events: AnswerEvents) -> AsyncIterator[str]:
        """Yield the events of an answer while it is sampled. One that fails, or whose client leaves, is given up."""
        live = LiveAnswer(
            events,
            asking.asked,
            len(sampling.names),
            form=self._plan.tool_call_form,
            decode=self._writer.text_of,
            text_of=self._text_of,
            echoes=self._echoes(asking),
        )
        try:
            for event in live.begin():
                yield event
            while (grown := await sampling.next_grown()) is not None:
                place, progress = grown
                if isinstance(progress, Unfinished):
                    found = live.grown(place, progress)
                else:
                    found = live.ended(place, self._checked(progress))
                for event in found:
                    yield event
            for event in live.end(self._told(asking, sampling.responses())):
                yield event
        except (Refused, Closed) as error:
            status = error.status if isinstance(error, Refused) else 503
            yield failed(str(error) or "the endpoint is closing", status)
        finally:
            sampling.give_up()

    def _echoes(self, asking: Asking) -> list[str]:
        """Return the text that each answer begins with, where the request asks for its prompt."""
        return [each.text for each in self._echoed(asking) for _ in range(asking.asked.answers)]

    def _echoed(self, asking: Asking) -> list[EchoedPrompt]:
        if not asking.asked.echo:
            return []
        pairs = zip(asking.asked.prompts, asking.prompts, strict=True)
        return [EchoedPrompt(one if isinstance(one, str) else self._writer.text_of(ids), ids) for one, ids in pairs]

    def _checked(self, response: Trajectory) -> Trajectory:
        """Return a response with the text that clients see. Raises: Refused when it has failed."""
        if response.stop_reason is StopReason.FAILED:
            blamed = response.failure_reason == GRAMMAR
            raise Refused(
                response.failure if blamed else f"the sampler failed: {response.failure}", 400 if blamed else 502
            )
        return replace(response, text=self._writer.text_of(response.token_ids))

    def _told(self, asking: Asking, responses: Sequence[Trajectory]) -> dict[str, Any]:
        """Return the body of an answer, which is recorded and remembered."""
        asked = asking.asked
        if not asked.max_tokens:  # one token was sampled, which no one asked for
            responses = [_without_tokens(each) for each in responses]
        responses = [self._checked(each) for each in responses]
        whole = answer(
            asking.name,
            self._plan.model,
            int(asking.created),
            asked,
            sum(map(len, asking.prompts)),
            responses,
            self._plan.tool_call_form,
            self._text_of,
            self._echoed(asking),
        )
        for index, response in enumerate(responses if self._record else ()):
            assert self._record is not None
            self._record.write(
                asking.session,
                response.sample_id,
                asked.messages,
                asked.tools,
                asking.prompts[index // asked.answers],
                response,
                continues=asking.continues,
                created=asking.created,
                sampling=asked.sampling or self._plan.sampling,
            )
        if asking.session and asked.messages is not None and len(responses) == 1:
            [response] = responses
            if shown_text(asked, response) == response.text:  # else the client has other text than was sampled
                told = whole["choices"][0]["message"]
                turn = SessionTurn(asked.messages, asked.tools, asking.prompts[0], response, told)
                self._sessions.remember(asking.session, turn)
        return whole

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _tokens(self, session: str, asked: EndpointRequest) -> tuple[list[tuple[int, ...]], bool]:
        """Tokenize prompts, one at a time, in another thread than the event loop's. Returns: their tokens, and True when they
        continue those of a session."""
        with self._tokenizing:
            return self._tokenized(session, asked)

    def _tokenized(self, session: str, asked: EndpointRequest) -> tuple[list[tuple[int, ...]], bool]:
        if asked.messages is not None:
            ids, continues = self._sessions.prompt_of(session, asked.messages, asked.tools)
            return [ids], continues
        return [raw_prompt_ids(self._tokenizer, prompt) for prompt in asked.prompts], False


async def _unknown(http: HttpRequest, error: Exception) -> Response:
    """The answer to a request for another path or by another method."""
    status = int(getattr(error, "status_code", 404))
    there = "GET /v1/models, POST /v1/chat/completions, /v1/completions, /v1/responses"
    return _error(f"there is no {http.method} {http.url.path[:100]}; there is {there}", status)


def _without_tokens(response: Trajectory) -> Trajectory:
    """Return a response as one of no tokens; a failed one as it is."""
    if response.stop_reason is StopReason.FAILED:
        return response
    return replace(response, token_ids=(), logprobs=(), top_logprobs=(), stop_reason=StopReason.LENGTH)


async def _body(http: HttpRequest, largest: int) -> Any:
    """Read the body. Raises: Refused when it is too long, too late, not JSON, or holds half a character."""
    try:
        body = json_text.loads(await read_body(http, largest=largest, within_s=BODY_S))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if half := json_text.half_character(body):
        raise Refused(f"{half[0] or 'the body'} holds half a character, {half[1]!r}")
    return body


def _streamed(events: Iterable[str] | AsyncIterable[str]) -> Response:
    """Send events as they come, through proxies that would otherwise collect them."""
    given = events if isinstance(events, AsyncIterable) else iter(events)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(given, media_type="text/event-stream", headers=headers)


def _error(message: str, status: int) -> Response:
    return JSONResponse(error_body(message, status), status)
