"""The HTTP server of an open run: OpenAI's chat completions and responses, and calls that begin and reward conversations."""

from __future__ import annotations

import hmac
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any

from posttrain.backends.environments.open.host import OpenConversation, OpenHost, described
from posttrain.data.chat_api import Refused
from posttrain.data.responses_api import as_chat, as_response
from posttrain.data.stream_events import events_of, in_one_piece
from posttrain.envs.agent.listener import AgentHandler, TurnAnswer, completion, models, read
from posttrain.libraries.http_host import names_this_machine
from posttrain.records.trajectories import Trajectory

CONVERSATION = "X-Conversation-Id"  # header: the conversation that a request belongs to; also in answers
GROUP = "X-Group-Id"  # header: the group that a new conversation belongs to


class OpenServer:
    """Answers programs outside, in a thread per connection, from its creation until it is closed.

    Raises: OSError when it cannot listen at the address.
    """

    def __init__(
        self, host: OpenHost, address: str, port: int, *, token: str, any_sampling: bool, text_of: Callable[[int], str]
    ):
        self.host = host
        self.any_sampling = any_sampling
        self.text_of = text_of
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
        return {"/v1/models": models, **ours}

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
        answer = request.wait(lambda: talk.turns.gone(request))
        if answer.message is None:
            raise Refused(answer.why, answer.status)
        whole = {**self._whole(answer, with_logprobs=bool(body.get("logprobs"))), "conversation": talk.name}
        if not request.stream:
            return as_response(whole) if as_items else whole
        head = {name: each for name, each in whole.items() if name not in ("object", "choices", "usage")}
        return list(in_one_piece(whole, events_of(head, chat=True, as_items=as_items, with_usage=request.with_usage)))

    def _whole(self, answer: TurnAnswer, *, with_logprobs: bool) -> dict[str, Any]:
        logprobs = None
        if with_logprobs and answer.response is not None:
            logprobs = {"content": self._logprobs(answer.response)}
        choice = {
            "index": 0,
            "finish_reason": answer.finish_reason,
            "logprobs": logprobs,
            "message": answer.message,
        }
        whole = completion(choice, answer)
        if answer.response is not None:
            whole["policy_version"] = answer.response.policy_version
        return whole

    def _logprobs(self, response: Trajectory) -> list[dict[str, Any]]:
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


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable() or not value.isascii():
        raise Refused(f"{name} must be a text of up to 200 printable ASCII characters")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_host() -> Any:
    raise Refused("this endpoint has another host name", 421)
