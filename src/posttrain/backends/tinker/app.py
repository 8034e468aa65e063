"""The HTTP routes of Tinker's API, below /api/v1."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.backends.endpoint.body import read_body
from posttrain.backends.tinker.clients import Session
from posttrain.backends.tinker.listings import checkpoint, checkpoints, run_of, runs, session_of, sessions, weights_info
from posttrain.backends.tinker.messages import PROTOBUF, loss_result, read_loss_request, sample_result
from posttrain.backends.tinker.requests import (
    LossResult,
    SampleResult,
    loss_result_json,
    read_loss_request_json,
    sample_result_json,
    text,
)
from posttrain.backends.tinker.service import Service
from posttrain.backends.tinker.worker import Failed
from posttrain.data.chat_api import Refused
from posttrain.libraries import json_text
from posttrain.libraries.http_host import names_this_machine

LARGEST_BODY = 256 << 20
BODY_S = 120.0  # for the body of a request
POLL_S = 25.0  # that a poll waits for a result; clients wait 45
_CLIENT_CONFIG = {
    "sample_max_concurrent_requests": 100,  # each holds a connection
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "proto_compress_fwdbwd": False,
    "pjwt_auth_enabled": False,
    "sample_join_sampling_session": True,
}

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPlan:
    """Settings of the HTTP layer."""

    token: str
    host_names: frozenset[str]


class TinkerApp:
    """Answers requests on one event loop; ``service`` does the work."""

    def __init__(self, plan: AppPlan, service: Service):
        self._plan = plan
        self._service = service

    def app(self) -> Starlette:
        service = self._service
        verbs: dict[str, Callable[[Body], Any]] = {
            "client/config": lambda body: _CLIENT_CONFIG,
            "client/dynamic_config": lambda body: {"sample_cancel_enabled": True},
            "create_session": lambda body: {"type": "create_session", "session_id": service.create_session()},
            "create_model": lambda body: _promise(service.create_model(body)),
            "get_info": lambda body: service.info(text(body, "model_id")),
            "unload_model": lambda body: _promise(service.unload(text(body, "model_id"))),
            "optim_step": lambda body: _promise(service.optim_step(body)),
            "save_weights": lambda body: _promise(service.save_state(body)),
            "save_weights_for_sampler": lambda body: _promise(service.save_for_sampler(body)),
            "load_weights": lambda body: _promise(service.load_state(body)),
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "weights_info": lambda body: weights_info(service.store, text(body, "tinker_path")),
            # Reports of the client about itself, which are not kept.
            "telemetry": lambda body: {"status": "accepted"},
        }
        listed: dict[str, Callable[[HttpRequest], Any]] = {
            "get_server_capabilities": lambda http: self._capabilities(),
            "samplers/{sampler:path}": lambda http: self._sampler(http.path_params["sampler"]),
            "training_runs": lambda http: runs(service.store, http.query_params),
            "training_runs/{run}": lambda http: run_of(service.store, http.path_params["run"]),
            "training_runs/{run}/checkpoints": lambda http: checkpoints(service.store, http.path_params["run"]),
            "checkpoints": lambda http: checkpoints(service.store, "*", http.query_params),
            "sessions": lambda http: sessions(service.sessions),
            "sessions/{session}": lambda http: session_of(service.sessions, http.path_params["session"]),
        }
        routes = [self._route("healthz", lambda http: _done({"status": "ok"}), "GET", needs_token=False)]
        routes += [self._route(path, self._with_body(verb), "POST") for path, verb in verbs.items()]
        routes += [self._route(path, _listing(listing), "GET") for path, listing in listed.items()]
        routes += [
            self._route("session_heartbeat", self._heartbeat, "POST"),
            self._route("sessions/{session}/finish", self._finish, "POST"),
            self._route("forward_backward", self._loss, "POST"),
            self._route("forward", self._loss, "POST"),
            self._route("retrieve_future", self._retrieve, "POST"),
            self._route("training_runs/{run}/checkpoints/{name:path}", self._delete, "DELETE"),
        ]
        return Starlette(routes=[*routes, Route("/{path:path}", self._guarded(_unknown), methods=_METHODS)])

    def _route(
        self, path: str, handler: Callable[[HttpRequest], Awaitable[Response]], method: str, *, needs_token: bool = True
    ) -> Route:
        return Route(f"/api/v1/{path}", self._guarded(handler, needs_token=needs_token), methods=[method])

    def _guarded(
        self, handler: Callable[[HttpRequest], Awaitable[Response]], *, needs_token: bool = True
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            if not names_this_machine(http.headers.get("host", ""), self._plan.host_names):
                return _error("this server has another host name (endpoint.host_names adds one)", 421)
            if needs_token and not self._knows(http):
                return _error("the key is missing or wrong: set TINKER_API_KEY as posttrain serve printed it", 401)
            try:
                return await handler(http)
            except Refused as refused:
                return _error(str(refused), refused.status)

        return answer

    def _knows(self, http: HttpRequest) -> bool:
        given = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._plan.token.encode())

    def _with_body(self, verb: Callable[[Body], Any]) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            return JSONResponse(verb(await _json(http)))

        return answer

    def _capabilities(self) -> dict[str, Any]:
        model = {
            "model_name": self._service.plan.model,
            "max_context_length": self._service.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def _create_sampling_session(self, body: Body) -> dict[str, Any]:
        made = self._service.create_sampling_session(body)
        return {"type": "create_sampling_session", "sampling_session_id": made}

    def _join_sampling_session(self, body: Body) -> dict[str, Any]:
        """Number the copies of a sampling client, whose requests carry numbers of their own."""
        sampler_id = text(body, "sampling_session_id")
        self._service.sessions.sampler(sampler_id)
        clones = self._service.sessions.of(sampler_id).clones
        clones[sampler_id] = clones.get(sampler_id, 0) + 1
        return {"type": "join_sampling_session", "client_counter": clones[sampler_id]}

    def _sample(self, body: Body) -> dict[str, Any]:
        request_id, sequences = self._service.sample(body)
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def _cancel(self, body: Body) -> dict[str, Any]:
        self._service.cancel(text(body, "request_id"))
        return {}

    def _sampler(self, sampler_id: str) -> dict[str, Any]:
        weights = self._service.sessions.sampler(sampler_id)
        return {"sampler_id": sampler_id, "base_model": self._service.plan.model, "model_path": weights.path}

    async def _heartbeat(self, http: HttpRequest) -> Response:
        try:
            found: Session = self._service.sessions.of(text(await _json(http), "session_id"))
        except Refused as refused:
            return _error(str(refused), 410)  # by which the client knows that it is over
        return JSONResponse({"type": "session_heartbeat", "session_id": found.session_id})

    async def _finish(self, http: HttpRequest) -> Response:
        self._service.finish_session(http.path_params["session"], "the client finished it")
        return Response(status_code=204)

    async def _loss(self, http: HttpRequest) -> Response:
        if PROTOBUF in http.headers.get("content-type", ""):
            request = await asyncio.to_thread(read_loss_request, await _content(http))
        else:
            forward_only = http.url.path.endswith("/forward")
            request = read_loss_request_json(await _json(http), forward_only=forward_only)
        return JSONResponse(_promise(self._service.loss(request)))

    async def _retrieve(self, http: HttpRequest) -> Response:
        request_id = text(await _json(http), "request_id")
        self._service.sessions.of(request_id)
        future = self._service.results.get(request_id)
        if future is None:
            return _error(f"there is no request {request_id}", 404)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # else asyncio reports it as unseen
        await asyncio.wait([waiting], timeout=POLL_S)
        if not future.done():
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        self._service.results.fetched(request_id)
        error = future.exception()
        if isinstance(error, Failed):
            return JSONResponse({"error": str(error), "category": error.category})
        return _result(future.result(), PROTOBUF in http.headers.get("accept", ""))

    async def _delete(self, http: HttpRequest) -> Response:
        run, name = http.path_params["run"], http.path_params["name"]
        self._service.store.delete(checkpoint(run, name))
        return Response(status_code=204)


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _listing(listing: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(http: HttpRequest) -> Response:
        return JSONResponse(listing(http))

    return answer


async def _done(value: Any) -> Response:
    return JSONResponse(value)


async def _unknown(http: HttpRequest) -> Response:
    raise Refused(f"this server has no {http.method} {http.url.path}; docs/tinker.md lists what it has")


def _promise(request_id: str) -> dict[str, Any]:
    return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


def _result(result: Any, binary: bool) -> Response:
    if isinstance(result, LossResult):
        return _binary(loss_result(result)) if binary else JSONResponse(loss_result_json(result))
    if isinstance(result, SampleResult):
        return _binary(sample_result(result)) if binary else JSONResponse(sample_result_json(result))
    return JSONResponse(result)


def _binary(content: bytes) -> Response:
    return Response(content, media_type=PROTOBUF)


async def _content(http: HttpRequest) -> bytes:
    """Read a body. Raises: Refused when it is too long, too late, or compressed."""
    if encoding := http.headers.get("content-encoding"):
        raise Refused(f"the body is compressed ({encoding}), which this server does not read")
    return await read_body(http, largest=LARGEST_BODY, within_s=BODY_S)


async def _json(http: HttpRequest) -> Body:
    content = await _content(http)
    try:
        body = json_text.loads(content) if content else {}
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, Mapping):
        raise Refused("the body is no JSON mapping")
    return body


def _error(message: str, status: int) -> Response:
    return JSONResponse({"detail": message, "error": message}, status)
