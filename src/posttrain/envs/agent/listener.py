"""The endpoint of an agent: OpenAI's chat completions, completions and responses, and GET /episode, POST /result for programs.

It listens on loopback, on a port of its own, and requires the token. A request waits here until the run has sampled its turn,
beside any other; one whose client disconnects before that is withdrawn.
Every connection serves one request, so that its thread ends with the answer.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.data.chat_api import Refused, check_framing, check_model, error_body
from posttrain.data.openai_api.answer import EchoedPrompt
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.data.openai_api.request import read
from posttrain.data.responses_api import as_chat, as_response
from posttrain.data.stream_events import events_of, in_one_piece
from posttrain.data.tool_forms import DEFAULT
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.turn_requests import MODEL, UNTRAINED, Choices, TurnRequest
from posttrain.interfaces.env import EnvSpec
from posttrain.libraries import json_text
from posttrain.records.trajectories import SamplingParams

# What every endpoint inside a run has in common: it samples what is trained.
RUN_HONOURS: Mapping[str, Any] = {
    "scores": False,
    "caps_tokens": True,
    "ignored_by": "environment.settings.any_sampling",
    "most_prompts": 1,
    "greedy": False,
    "no_grammars": (
        "this run cannot train: it is for rollout.engine native, with a policy.engine other than megatron, a KL that is not "
        "estimated over the whole vocabulary, and no teachers"
    ),
}
MOST_TOKENS = 1 << 20  # of a turn, where no run sets a limit
LARGEST_BODY = 16 << 20  # bytes
MOST_DISCARDED = 256 << 20  # bytes of a body that is too large, read before it is refused
READ_S = 60.0  # time limit for reading the body of a request
# Of a body whose end is unknown: read at most so long and so many bytes, or until nothing comes for PAUSE_S
READ_LOST_S, MOST_LOST, PAUSE_S = 1.0, 16 << 20, 0.2


class Listener:
    """The HTTP server of one episode. Listens from its creation, and answers after ``start``."""

    def __init__(
        self,
        on_request: Callable[[Sequence[TurnRequest]], None],
        *,
        sampling: SamplingParams,
        honours: Honours,
        form: str = DEFAULT,
        on_gone: Callable[[TurnRequest], None] = lambda request: request.refuse("the client has left", 499),
        reads: Callable[[Any], Any] = lambda body: body,
    ):
        """Args: on_request takes the choices of a request; sampling, the run's; form, of tool calls; reads makes the body that is
        read of the one that came."""
        self.token = secrets.token_urlsafe(24)
        self.result: Mapping[str, Any] | None = None  # sent by a program to POST /result
        self._on_request = on_request
        self._on_gone, self._reads = on_gone, reads
        self._sampling, self._honours, self.form = sampling, honours, form
        self._waiting: set[Choices] = set()
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
            for choices in self._waiting:
                choices.requests[0].refuse("the episode is over", 503)
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def authorized(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def episode_body(self) -> dict[str, Any]:
        return self._episode

    def turn(self, body: Any, gone: Callable[[], bool], *, chat: bool) -> Choices:
        """Wait for the policy's turns, or until the client has ``gone``. Raises: Refused."""
        body = self._reads(body)
        asked = read(body, self._sampling, chat=chat, honours=self._honours, form=self.form)
        trained = body.get("model") != UNTRAINED
        if trained:
            check_model(body, MODEL)
        choices = Choices(asked, gone, trained=trained)
        if choices.asked.echo and not isinstance(choices.asked.prompts[0], str):
            raise Refused("echo is for prompts that are text: agents have no tokenizer")
        with self._lock:
            if self._closed:
                raise Refused("the episode is over", 503)
            self._waiting.add(choices)

        def leave() -> None:
            for request in choices.requests:
                self._on_gone(request)

        try:
            self._on_request(choices.requests)
            choices.wait(leave)
        finally:
            with self._lock:
                self._waiting.discard(choices)
        return choices


def run_sampling(spec: EnvSpec) -> SamplingParams:
    """Return the distribution that the turns of an episode are drawn from, and their limit."""
    return spec.sampling or SamplingParams(max_response_tokens=MOST_TOKENS)


def turn_honours(spec: EnvSpec, *, any_sampling: bool) -> Honours:
    """Return the parameters of requests that the turns of an agent honour: the run determines the distribution."""
    return Honours(
        stops="stop" in spec.honours,
        seeds="seed" in spec.honours,
        grammars="grammar" in spec.honours,
        distributions=frozenset({"temperature"} & set(spec.honours)),
        **RUN_HONOURS,
        ignored=frozenset({*DISTRIBUTION, "seed"}) if any_sampling else frozenset(),
    )


def new_name() -> str:
    """Return the id of an answer."""
    return f"turn-{secrets.token_hex(8)}"


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
        return {
            "/v1/chat/completions": lambda: self._turn(self._body(), chat=True),
            "/v1/completions": lambda: self._turn(self._body(), chat=False),
            "/v1/responses": lambda: self._turn(as_chat(self._body()), chat=True, as_items=True),
            "/result": self._result,
        }

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request for a route, in the form of all other errors."""
        self.close_connection = True
        there = f"{message or 'the request is malformed'}; there is POST {', '.join(self._posts())}"
        self._send(json.dumps(error_body(there, code)), code)

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: requests are not logged."""

    def _answer(self, routes: Mapping[str, Callable[[], Any]]) -> None:
        try:
            self._check_framing()
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
        except Exception as error:  # noqa: BLE001 - a client that gets no answer would wait, or try again without end
            self._send(json.dumps(error_body(f"the endpoint has failed: {type(error).__name__}: {error}", 500)), 500)
        else:
            if isinstance(found, Iterator):
                self._send_events(found)
            else:
                self._send(json.dumps(found), 200)

    def _turn(self, body: Any, *, chat: bool, as_items: bool = False) -> Any:
        """Have a turn sampled, and return the answer; ``as_items``, as the responses API has it."""
        choices = self._listener.turn(body, self._client_has_gone, chat=chat)
        asked = choices.asked
        echoed = [EchoedPrompt(str(asked.prompts[0]), ())] if asked.echo else []
        whole = choices.whole(new_name(), form=self._listener.form, created=int(time.time()), echoed=echoed)
        if not asked.stream:
            return as_response(whole) if as_items else whole
        head = {name: whole[name] for name in ("id", "created", "model")}
        return in_one_piece(whole, events_of(head, chat=chat, as_items=as_items, with_usage=asked.with_usage))

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
        if len(size) > 12 or int(size) > LARGEST_BODY:
            self._discard(MOST_DISCARDED if len(size) > 12 else int(size))
            raise Refused(f"the body has more than {LARGEST_BODY >> 20} MiB", 413)
        try:
            body = json_text.loads(self.rfile.read(int(size)))
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if half := json_text.half_character(body):
            raise Refused(f"{half[0] or 'the body'} holds half a character, {half[1]!r}")
        return body

    def _check_framing(self) -> None:
        """Raises: Refused, with the connection to be closed."""
        try:
            check_framing(self.headers.get_all("content-length", []), self.headers.get_all("transfer-encoding", []))
        except Refused:
            self.close_connection = True
            self._drop_rest()
            raise

    def _drop_rest(self) -> None:
        """Read what comes of a body whose end is unknown: closing over unread bytes could take the answer with it."""
        end, left = time.monotonic() + READ_LOST_S, MOST_LOST
        self.connection.settimeout(PAUSE_S)
        with suppress(OSError):
            while left > 0 and time.monotonic() < end and (piece := self.rfile.read1(1 << 16)):
                left -= len(piece)
        self.connection.settimeout(self.timeout)

    def _discard(self, size: int) -> None:
        """Read a body that is refused, up to a limit: clients look for an answer only after they have sent it."""
        self.close_connection = True
        left = min(size, MOST_DISCARDED)
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 20))):
            left -= len(piece)

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
