"""The endpoint of an agent: POST /v1/chat/completions, and GET /episode, POST /result for programs.

It listens on loopback, on a port of its own, and requires the token. A request waits here until the run has sampled its turn,
beside any other; one whose client disconnects before that is withdrawn.
Every connection serves one request, so that its thread ends with the answer.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.data.chat_api import (
    Refused,
    check_model,
    error_body,
    is_count,
    messages_of,
    tool_problems,
    tools_of,
    wants_usage,
    word_problems,
)
from posttrain.data.stream_events import events_of, in_one_piece
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.interfaces.env import Message, Tool
from posttrain.libraries import json_text
from posttrain.records.trajectories import Trajectory, Unfinished

MODEL = "policy"  # the only name that requests may give
SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p")  # parameters of a distribution, which is the run's
LARGEST_BODY = 16 << 20  # bytes
LOOK_S = 0.1  # between two checks that a client is still connected
READ_S = 60.0  # time limit for reading the body of a request


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    message: Message | None  # None: refused, with ``why``
    finish_reason: str = ""
    why: str = ""
    status: int = 400
    prompt_tokens: int = 0
    response_tokens: int = 0
    response: Trajectory | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRequest:
    """A request for a turn, pending until ``answer`` or ``refuse`` is called. ``gone`` tells that its client has disconnected."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    max_tokens: int | None
    stream: bool
    with_usage: bool = False  # at the end of a stream
    gone: Callable[[], bool] = lambda: False
    _reply: queue.SimpleQueue[TurnAnswer | Unfinished] = field(default_factory=queue.SimpleQueue)

    def answer(
        self,
        message: Message,
        *,
        cut: bool,
        prompt_tokens: int,
        response_tokens: int,
        response: Trajectory | None = None,
    ) -> None:
        """Answer the request. ``cut``: a token limit ended the turn. ``response``: its tokens, where they are known here."""
        reason = "tool_calls" if "tool_calls" in message else "length" if cut else "stop"
        self._reply.put(
            TurnAnswer(message, reason, prompt_tokens=prompt_tokens, response_tokens=response_tokens, response=response)
        )

    def refuse(self, why: str, status: int = 400) -> None:
        self._reply.put(TurnAnswer(None, why=why, status=status))

    def grown(self, progress: Unfinished) -> None:
        """Take the tokens that were sampled since the last call."""
        self._reply.put(progress)

    def wait(self, on_gone: Callable[[], None]) -> TurnAnswer:
        """Return the answer. ``on_gone`` is called when the client disconnects before it, and may answer."""
        while isinstance(found := self.next(on_gone), Unfinished):
            pass
        return found

    def next(self, on_gone: Callable[[], None]) -> TurnAnswer | Unfinished:
        """Return the next tokens, where they are reported while they are sampled, or else the answer; as ``wait``."""
        while True:
            try:
                return self._reply.get(timeout=LOOK_S)
            except queue.Empty:
                if self.gone():
                    on_gone()


class Listener:
    """The HTTP server of one episode. Listens from its creation, and answers after ``start``."""

    def __init__(
        self,
        on_request: Callable[[TurnRequest], None],
        *,
        any_sampling: bool,
        on_gone: Callable[[TurnRequest], None] = lambda request: request.refuse("the client has left", 499),
    ):
        self.token = secrets.token_urlsafe(24)
        self.result: Mapping[str, Any] | None = None  # sent by a program to POST /result
        self._on_request = on_request
        self._on_gone = on_gone
        self._any_sampling = any_sampling
        self._waiting: set[TurnRequest] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._episode: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), AgentHandler)
        self._server.daemon_threads = False  # so that closing waits for them: forking is unsafe while they run
        self._server.listener = self  # type: ignore[attr-defined]
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fileno(self) -> int:
        return self._server.fileno()

    def start(self, episode: AgentEpisode, options: Mapping[str, Any]) -> None:
        self._episode = {**episode.plain(), "options": dict(options)}
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="agent-listener", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Reject the pending requests and end all threads."""
        with self._lock:
            self._closed = True
            for request in self._waiting:
                request.refuse("the episode is over", 503)
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def authorized(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def episode_body(self) -> dict[str, Any]:
        return self._episode

    def turn(self, body: Any, gone: Callable[[], bool]) -> tuple[TurnRequest, TurnAnswer]:
        """Wait for the policy's turn, or until the client has ``gone``. Raises: Refused."""
        request = replace(read(body, any_sampling=self._any_sampling), gone=gone)
        with self._lock:
            if self._closed:
                raise Refused("the episode is over", 503)
            self._waiting.add(request)
        self._on_request(request)
        answer = request.wait(lambda: self._on_gone(request))
        with self._lock:
            self._waiting.discard(request)
        return request, answer


def read(body: Any, *, any_sampling: bool, gives_logprobs: bool = False) -> TurnRequest:
    """Parse the body of a request. Raises: Refused with all problems."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    skipped = {*SAMPLED_BY, *(("seed",) if any_sampling else ())}
    considered = {name: value for name, value in body.items() if name not in skipped}
    problems = [*word_problems(considered), *tool_problems(body)]
    for name in () if any_sampling else SAMPLED_BY:
        if body.get(name) is not None:
            problems.append(
                f"{name} is set by the run; omit it, or have it ignored (environment.settings.any_sampling=true)"
            )
    if body.get("stop"):
        problems.append("stop is set by the run (rollout.stop)")
    if body.get("n") not in (None, 1):
        problems.append("n must be 1: a turn is sampled once")
    if body.get("logprobs") and not gives_logprobs:
        problems.append("logprobs are not returned to agents")
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    if wanted is not None and not is_count(wanted):
        problems.append(f"max_tokens is {json.dumps(wanted)[:60]}; use a whole number above 0")
    messages: list[dict[str, Any]] = []
    try:
        messages = messages_of(body.get("messages"))
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        raise Refused("; ".join(problems))
    check_model(body, MODEL)
    return TurnRequest(
        messages=messages,
        tools=tools_of(body),
        max_tokens=wanted,
        stream=bool(body.get("stream")),
        with_usage=wants_usage(body),
    )


def new_name() -> str:
    """Return the id of an answer."""
    return f"turn-{secrets.token_hex(8)}"


def completion(choice: Mapping[str, Any], answer: TurnAnswer, name: str) -> dict[str, Any]:
    """Build the body of an answer; ``name``, its id."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.response_tokens,
            "total_tokens": answer.prompt_tokens + answer.response_tokens,
        },
    }


class AgentHandler(BaseHTTPRequestHandler):
    timeout = READ_S

    @property
    def _listener(self) -> Listener:
        found: Listener = self.server.listener  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        self._answer(self._gets())

    def do_POST(self) -> None:
        self._answer(self._posts())

    def _gets(self) -> Mapping[str, Callable[[], Any]]:
        return {"/episode": self._listener.episode_body, **model_routes()}

    def _posts(self) -> Mapping[str, Callable[[], Any]]:
        return {"/v1/chat/completions": self._turn, "/result": self._result}

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: requests are not logged."""

    def _answer(self, routes: Mapping[str, Callable[[], Any]]) -> None:
        try:
            if not self._listener.authorized(self.headers.get("authorization", "")):
                raise Refused("the bearer token is missing or wrong (Authorization: Bearer TOKEN)", 401)
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                raise Refused(
                    f"there is no {self.command} {self.path[:100]}; there is POST {', '.join(self._posts())}", 404
                )
            found = route()
        except Refused as refused:
            self._send(json.dumps(error_body(str(refused), refused.status)), refused.status)
        except OSError:  # the agent has ended, or sends nothing more
            self.close_connection = True
        else:
            if isinstance(found, Iterator):
                self._send_events(found)
            else:
                self._send(json.dumps(found), 200)

    def _turn(self) -> Any:
        request, answer = self._listener.turn(self._body(), self._client_has_gone)
        if answer.message is None:
            raise Refused(answer.why, answer.status)
        choice = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None, "message": answer.message}
        whole = completion(choice, answer, new_name())
        if not request.stream:
            return whole
        head = {name: whole[name] for name in ("id", "created", "model")}
        return in_one_piece(whole, events_of(head, chat=True, as_items=False, with_usage=request.with_usage))

    def _client_has_gone(self) -> bool:
        """A client that waits for an answer sends nothing: its connection is readable once it is closed."""
        poller = select.poll()
        try:
            poller.register(self.connection, select.POLLIN)
            return bool(poller.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _result(self) -> Any:
        body = self._body()
        if not isinstance(body, dict):
            raise Refused("a result is a JSON object: reward, and metrics if there are any")
        self._listener.result = body
        return {"ok": True}

    def _body(self) -> Any:
        size = self.headers.get("content-length", "")
        if not size.isdigit():
            raise Refused("the length of the body is missing", 411)
        if int(size) > LARGEST_BODY:
            raise Refused(f"the body has more than {LARGEST_BODY >> 20} MiB", 413)
        try:
            return json_text.whole_characters(json_text.loads(self.rfile.read(int(size))))
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {error}") from None

    def _send_events(self, events: Iterator[str]) -> None:
        """Send server-sent events as they come. The end of the connection is the end of the stream."""
        self.close_connection = True
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.end_headers()
            for event in events:
                self.wfile.write(event.encode())
                self.wfile.flush()
        except OSError:  # the agent has ended
            return

    def _send(self, text: str, status: int) -> None:
        data = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the agent has ended
            self.close_connection = True


def model_routes() -> dict[str, Callable[[], Any]]:
    """Return the paths that list the one model and describe it."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
    return {"/v1/models": lambda: {"object": "list", "data": [model]}, f"/v1/models/{MODEL}": lambda: model}
