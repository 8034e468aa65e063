"""The HTTP server of an open run: OpenAI's chat completions and responses, and calls that begin and reward conversations."""

from __future__ import annotations

import hmac
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any

from posttrain.backends.environments.open.host import OpenConversation, OpenHost, described
from posttrain.data.chat_api import Refused
from posttrain.data.responses_api import as_chat, as_response
from posttrain.data.stream_events import events_of, failed
from posttrain.data.text_pieces import TextPieces
from posttrain.data.tool_forms import openings_of
from posttrain.envs.agent.listener import (
    MODEL,
    AgentHandler,
    TurnAnswer,
    TurnRequest,
    completion,
    model_routes,
    new_name,
    read,
)
from posttrain.libraries.http_host import names_this_machine
from posttrain.records.trajectories import Trajectory, Unfinished

CONVERSATION = "X-Conversation-Id"  # header: the conversation that a request belongs to; also in answers
GROUP = "X-Group-Id"  # header: the group that a new conversation belongs to


class OpenServer:
    """Answers programs outside, in a thread per connection, from its creation until it is closed.

    Args: text_of, of one token, for log-probs; decode, the text of a turn's tokens.
    Raises: OSError when it cannot listen at the address.
    """

    def __init__(
        self,
        host: OpenHost,
        address: str,
        port: int,
        *,
        token: str,
        any_sampling: bool,
        text_of: Callable[[int], str],
        decode: Callable[[Sequence[int]], str],
    ):
        self.host = host
        self.any_sampling = any_sampling
        self.text_of, self.decode = text_of, decode
        self._token = token
        self._names = frozenset({"localhost", address.lower()})
        self._server = ThreadingHTTPServer((address, port), _Handler)
        self._server.daemon_threads = True
        self._server.listener = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="open-run", daemon=True
        )
        self._thread.start()
        host.on_close = self.close

    @property
    def url(self) -> str:
        name, port = self._server.server_address[:2]
        return f"http://{name!s}:{port}"

    def authorized(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    def names_it(self, host: str) -> bool:
        """Return True for a Host header that names this machine: no web page whose name resolves to it may ask."""
        return names_this_machine(host, self._names)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(AgentHandler):
    @property
    def _open(self) -> OpenServer:
        found: OpenServer = self.server.listener  # type: ignore[attr-defined]
        return found

    def _gets(self) -> Mapping[str, Callable[[], Any]]:
        path = self.path.partition("?")[0]
        name = path.removeprefix("/conversations/")
        ours = {path: lambda: described(self._open.host.found(name))} if name != path else {}
        return {**model_routes(), **ours}

    def _posts(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/conversations": self._begin,
            "/rewards": self._reward,
        }

    def _answer(self, routes: Mapping[str, Callable[[], Any]]) -> None:
        if not self._open.names_it(self.headers.get("host", "")):
            routes = dict.fromkeys(routes, _wrong_host)
        super()._answer(routes)

    def end_headers(self) -> None:
        if talk := getattr(self, "_talk", None):
            self.send_header(CONVERSATION, talk.name)
        super().end_headers()

    def _chat(self) -> Any:
        return self._completed(self._body(), as_items=False)

    def _responses(self) -> Any:
        return self._completed(as_chat(self._body()), as_items=True)

    def _completed(self, body: Any, *, as_items: bool) -> Any:
        """Have a turn sampled, and return the answer; ``as_items``, as the responses API has it."""
        request = replace(
            read(body, any_sampling=self._open.any_sampling, gives_logprobs=True), gone=self._client_has_gone
        )
        if body.get("top_logprobs"):
            raise Refused("top_logprobs must be 0: the run keeps the log-probs of the sampled tokens only")
        name, label = self.headers.get(CONVERSATION, ""), self.headers.get(GROUP, "")
        talk = self._open.host.request(name, label, request)
        self._talk = talk
        with_logprobs = bool(body.get("logprobs"))
        first = request.next(lambda: talk.turns.gone(request))
        if request.stream:
            _answered(first)
            return self._events(talk, request, first, as_items=as_items, with_logprobs=with_logprobs)
        while isinstance(first, Unfinished):
            first = request.next(lambda: talk.turns.gone(request))
        whole = self._whole(_answered(first), {"conversation": talk.name}, new_name(), with_logprobs=with_logprobs)
        return as_response(whole) if as_items else whole

    def _events(
        self,
        talk: OpenConversation,
        request: TurnRequest,
        found: TurnAnswer | Unfinished,
        *,
        as_items: bool,
        with_logprobs: bool,
    ) -> Iterator[str]:
        """Yield the events of a turn while it is sampled; ``found`` is what came first."""
        head: dict[str, Any] = {"conversation": talk.name}
        if (version := _version(found)) is not None:
            head["policy_version"] = version
        head |= {"id": new_name(), "created": int(time.time()), "model": MODEL}
        events = events_of(head, chat=True, as_items=as_items, with_usage=request.with_usage)
        opening = openings_of(talk.place.spec.tool_call_form) if request.tools else ()
        pieces, sent = TextPieces(self._open.decode, opening=opening), 0
        while isinstance(found, Unfinished):
            sent += len(found.token_ids)
            logprobs = {"content": self._logprobs(found)} if with_logprobs else None
            yield from events.piece(0, pieces.add(found.token_ids), logprobs)
            found = request.next(lambda: talk.turns.gone(request))
        try:
            whole = self._whole(_answered(found), head, head["id"], with_logprobs=with_logprobs)
        except Refused as refused:
            yield failed(str(refused), refused.status)
            return
        [choice] = whole["choices"]
        rest = {"content": choice["logprobs"]["content"][sent:]} if choice["logprobs"] else None
        yield from events.finished(choice, pieces.rest(choice["message"]["content"] or ""), rest)
        yield from events.end(whole)

    def _whole(self, answer: TurnAnswer, head: Mapping[str, Any], name: str, *, with_logprobs: bool) -> dict[str, Any]:
        logprobs = None
        if with_logprobs and answer.response is not None:
            logprobs = {"content": self._logprobs(answer.response)}
        choice = {
            "index": 0,
            "finish_reason": answer.finish_reason,
            "logprobs": logprobs,
            "message": answer.message,
        }
        version = {} if answer.response is None else {"policy_version": answer.response.policy_version}
        return {**completion(choice, answer, name), **head, **version}

    def _logprobs(self, response: Trajectory | Unfinished) -> list[dict[str, Any]]:
        pairs = zip(response.token_ids, response.logprobs, strict=True)
        texts = [(token, self._open.text_of(token), logprob) for token, logprob in pairs]
        return [
            {"token": text, "token_id": token, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for token, text, logprob in texts
        ]

    def _begin(self) -> Any:
        body = self._object(known={"conversation", "group"})
        talk = self._open.host.begin(_text(body, "conversation"), _text(body, "group"))
        self._talk = talk
        return described(talk)

    def _reward(self) -> Any:
        body = self._object(known={"conversation", "reward", "metrics"})
        reward, metrics = body.get("reward"), body.get("metrics") or {}
        if reward is not None and not _is_finite(reward):
            raise Refused(
                f"reward is {json.dumps(reward)[:60]}; use a finite number, or null for the run's reward terms"
            )
        if not isinstance(metrics, dict) or not all(_is_finite(value) for value in metrics.values()):
            raise Refused("metrics must be finite numbers by name")
        talk: OpenConversation = self._open.host.reward(
            _text(body, "conversation") or self.headers.get(CONVERSATION, ""), reward, metrics
        )
        return {"ok": True, "conversation": talk.name, "sample": talk.place.episode, "turns": talk.turns.turns}

    def _object(self, *, known: set[str]) -> dict[str, Any]:
        body = self._body() if self.headers.get("content-length", "0") != "0" else {}
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        if unknown := sorted(set(body) - known):
            raise Refused(f"{', '.join(unknown)} is not known (known: {', '.join(sorted(known))})")
        return body


def _answered(found: TurnAnswer | Unfinished) -> Any:
    """Raises: Refused when a turn was refused."""
    if isinstance(found, TurnAnswer) and found.message is None:
        raise Refused(found.why, found.status)
    return found


def _version(found: TurnAnswer | Unfinished) -> int | None:
    """The weights that a turn begins with."""
    if isinstance(found, Unfinished):
        return found.spans[0].version
    return None if found.response is None else found.response.policy_version


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable() or not value.isascii():
        raise Refused(f"{name} must be a text of up to 200 printable ASCII characters")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_host() -> Any:
    raise Refused("this endpoint has another host name", 421)
