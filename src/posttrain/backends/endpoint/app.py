"""The HTTP routes: /v1/models, /v1/chat/completions, /v1/completions. The sole importer of starlette."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from posttrain.backends.endpoint.driver import Closed, Driver
from posttrain.backends.endpoint.record import Record
from posttrain.backends.endpoint.request import EndpointRequest, answer, read
from posttrain.backends.endpoint.sessions import Sessions, SessionTurn
from posttrain.data.chat_api import Refused, as_events, check_model, error_body
from posttrain.data.turns import TemplateTurns
from posttrain.errors import RequestError
from posttrain.interfaces.rollout_engine import Request
from posttrain.libraries import json_text
from posttrain.libraries.http_host import names_this_machine
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

# Bytes of a body: enough for max_prompt_tokens of text in JSON, so that nothing much longer is tokenized to be refused.
_SMALLEST_LIMIT, _LARGEST_LIMIT, _BYTES_PER_TOKEN = 1 << 20, 16 << 20, 64
BODY_S = 60.0  # for the body of a request
_LOOK_S = 1.0  # between two checks that the client is still connected


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlan:
    """Settings of an endpoint, in plain values."""

    model: str  # name in answers
    token: str
    sampling: SamplingParams
    max_prompt_tokens: int
    any_sampling: bool
    session_header: str
    max_sessions: int
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
        self._writer = TemplateTurns(tokenizer, options)
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
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
            ]
        )

    async def health(self, http: HttpRequest) -> Response:
        """Report health. Needs no token."""
        if refusal := self._wrong_host(http):
            return refusal
        return JSONResponse({"ok": self._driver.alive}, 200 if self._driver.alive else 503)

    async def models(self, http: HttpRequest) -> Response:
        if refusal := self._refusal(http):
            return refusal
        model = {"id": self._plan.model, "object": "model", "created": 0, "owned_by": "posttrain"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answered(http, chat=True)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answered(http, chat=False)

    async def _answered(self, http: HttpRequest, *, chat: bool) -> Response:
        if refusal := self._refusal(http):
            return refusal
        try:
            body = await _body(http, self._largest_body)
            asked = read(body, self._plan.sampling, chat=chat, any_sampling=self._plan.any_sampling)
            check_model(body, self._plan.model)
            return await self._sampled(http, asked)
        except Refused as refused:
            return _error(str(refused), refused.status)
        except RequestError as error:  # the chat template rejects the messages
            return _error(str(error), 400)
        except Closed:
            return _error("the endpoint is closing", 503)

    @property
    def _largest_body(self) -> int:
        return min(max(_SMALLEST_LIMIT, _BYTES_PER_TOKEN * self._plan.max_prompt_tokens), _LARGEST_LIMIT)

    def _wrong_host(self, http: HttpRequest) -> Response | None:
        if names_this_machine(http.headers.get("host", ""), self._plan.host_names):
            return None
        return _error("this endpoint has another host name (endpoint.host_names adds one)", 421)

    def _refusal(self, http: HttpRequest) -> Response | None:
        if wrong := self._wrong_host(http):
            return wrong
        given = http.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._plan.token}".encode()):
            return None
        return _error("the bearer token is missing or wrong (Authorization: Bearer TOKEN)", 401)

    async def _sampled(self, http: HttpRequest, asked: EndpointRequest) -> Response:
        number = next(self._numbers)
        session = http.headers.get(self._plan.session_header, "")
        ids, continues = await asyncio.to_thread(self._tokens, session, asked)
        room = self._plan.max_prompt_tokens
        if len(ids) > room:
            raise Refused(f"the prompt has {len(ids)} tokens, and {room} are allowed (data.max_prompt_tokens)")
        name = f"{session or 'request'}-{number}"
        responses = await self._responses(http, name, session, ids, asked)
        created = time.time()
        for response in responses:
            if response.stop_reason is StopReason.FAILED:
                raise Refused(f"the sampler failed: {response.failure}", 502)
        whole = answer(name, self._plan.model, int(created), asked, len(ids), responses)
        for response in responses if self._record else ():
            assert self._record is not None
            self._record.write(
                session,
                response.sample_id,
                asked.messages,
                asked.tools,
                ids,
                response,
                continues=continues,
                created=created,
            )
        if session and asked.messages is not None and len(responses) == 1:
            told = whole["choices"][0]["message"]
            self._sessions.remember(session, SessionTurn(asked.messages, asked.tools, ids, responses[0], told))
        return (
            StreamingResponse(iter(as_events(whole)), media_type="text/event-stream")
            if asked.stream
            else JSONResponse(whole)
        )

    def _tokens(self, session: str, asked: EndpointRequest) -> tuple[tuple[int, ...], bool]:
        """Tokenize a prompt, one at a time, in another thread than the event loop's. Returns: its tokens, and True when they
        continue those of a session."""
        with self._tokenizing:
            return self._tokenized(session, asked)

    def _tokenized(self, session: str, asked: EndpointRequest) -> tuple[tuple[int, ...], bool]:
        if asked.messages is not None:
            return self._sessions.prompt_of(session, asked.messages, asked.tools)
        if isinstance(asked.prompt, str):
            return tuple(self._tokenizer(asked.prompt, verbose=False)["input_ids"]), False
        size = len(self._tokenizer)
        if not all(0 <= token < size for token in asked.prompt):
            raise Refused(f"prompt holds a token id outside 0 to {size - 1}")
        return asked.prompt, False

    async def _responses(
        self, http: HttpRequest, name: str, session: str, ids: tuple[int, ...], asked: EndpointRequest
    ) -> list[Trajectory]:
        """Sample the responses. Raises: Closed; Refused when the client has disconnected."""
        names = [f"{name}-{place}" for place in range(asked.answers)]
        conversation = session if asked.answers == 1 else ""
        waiting = [
            asyncio.wrap_future(
                self._driver.submit(
                    Request(
                        sample_id=each, token_ids=ids, max_response_tokens=asked.max_tokens, conversation=conversation
                    )
                )
            )
            for each in names
        ]
        while True:
            _, pending = await asyncio.wait(waiting, timeout=_LOOK_S)
            if not pending:
                break
            if await http.is_disconnected():
                for each, future in zip(names, waiting, strict=True):
                    if future in pending:
                        self._driver.give_up(each)
                raise Refused("the client has left", 499)
        try:
            return [future.result() for future in waiting]
        except ValueError as error:  # the prompt is too long for the sampler
            raise Refused(str(error)) from None


async def _body(http: HttpRequest, largest: int) -> Any:
    """Read the body. Raises: Refused when it is too long, too late, not JSON, or holds half a character."""
    too_long = Refused(f"the body has more than {largest} bytes", 413)
    given = http.headers.get("content-length", "")
    if given.isdigit() and int(given) > largest:
        raise too_long
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in http.stream():
                size += len(piece)
                if size > largest:
                    raise too_long
                pieces.append(piece)
    except TimeoutError:
        raise Refused(f"the body did not come within {BODY_S:g} s", 408) from None
    except ClientDisconnect:
        raise Refused("the client has left", 499) from None
    try:
        body = json_text.loads(b"".join(pieces))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if half := json_text.half_character(body):
        raise Refused(f"{half[0] or 'the body'} holds half a character, {half[1]!r}")
    return body


def _error(message: str, status: int) -> Response:
    return JSONResponse(error_body(message, status), status)
