"""The HTTP server of an open run: OpenAI's chat completions, completions and responses, and calls that begin and reward
conversations."""

from __future__ import annotations

import hmac
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from posttrain.backends.environments.open.conversation import OpenConversation, described
from posttrain.backends.environments.open.host import OpenHost
from posttrain.data.chat_api import Refused, check_model
from posttrain.data.openai_api.answer import EchoedPrompt, LiveAnswer
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.openai_api.request import EndpointRequest, read
from posttrain.data.responses_api import as_chat, as_response
from posttrain.data.stream_events import AnswerEvents, events_of, failed, in_one_piece
from posttrain.data.tool_forms import DEFAULT
from posttrain.envs.agent.listener import AgentHandler, model_routes, new_name
from posttrain.envs.agent.turn_requests import MODEL, Choices, TurnAnswer
from posttrain.errors import DataError
from posttrain.libraries.http_host import names_this_machine
from posttrain.records.trajectories import SamplingParams, Unfinished

CONVERSATION = "X-Conversation-Id"  # header: the conversation that a request belongs to; also in answers
GROUP = "X-Group-Id"  # header: the group that a new conversation belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTexts:
    """Conversions between tokens and texts."""

    text_of: Callable[[int], str]  # of one token, for log-probs
    decode: Callable[[Sequence[int]], str]  # of a turn
    # Of the prompt of a completion; raises DataError
    encode: Callable[[str | tuple[int, ...]], tuple[int, ...]]
    form: str = DEFAULT  # of tool calls


class OpenServer:
    """Answers programs outside, in a thread per connection, from its creation until it is closed.

    Args: sampling, the run's; honours, what it takes of requests.
    Raises: OSError when it cannot listen at the address.
    """

    def __init__(
        self,
        host: OpenHost,
        address: str,
        port: int,
        *,
        token: str,
        sampling: SamplingParams,
        honours: Honours,
        tokens: TokenTexts,
    ):
        self.host = host
        self.sampling, self.honours, self.tokens = sampling, honours, tokens
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
            "/v1/chat/completions": lambda: self._completed(self._body(), chat=True),
            "/v1/completions": lambda: self._completed(self._body(), chat=False),
            "/v1/responses": lambda: self._completed(as_chat(self._body()), chat=True, as_items=True),
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

    def _completed(self, body: Any, *, chat: bool, as_items: bool = False) -> Any:
        """Have a turn sampled, and return the answer; ``as_items``, as the responses API has it."""
        server = self._open
        asked = read(body, server.sampling, chat=chat, honours=server.honours, form=server.tokens.form)
        check_model(body, MODEL)
        prompt = self._echoed(asked)
        choices = Choices(asked, self._client_has_gone)
        name, label = self._named_in(CONVERSATION), self._named_in(GROUP)
        turn = _Turn(server, choices, server.host.request(name, label, choices.requests), prompt, as_items)
        if turn.is_one:
            self._talk = turn.talks[0]
        try:
            if asked.stream:
                return turn.events()
            choices.wait(turn.leave)
        except Refused:
            turn.leave()  # the other choices
            raise
        whole = turn.whole()
        return as_response(whole) if as_items else whole

    def _named_in(self, header: str) -> str:
        return _checked(self.headers.get(header) or "", header)

    def _echoed(self, asked: EndpointRequest) -> list[EchoedPrompt]:
        """Check the prompt of a completion, and return it where answers begin with it. Raises: Refused."""
        if asked.messages is not None:
            return []
        [prompt], tokens = asked.prompts, self._open.tokens
        try:
            ids = tokens.encode(prompt)
        except DataError as error:
            raise Refused(str(error)) from None
        if not asked.echo:
            return []
        return [EchoedPrompt(prompt if isinstance(prompt, str) else tokens.decode(ids), ids)]

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
                f"reward is {json.dumps(reward)[:60]}; use a finite number, or null for the run's environment or reward terms"
            )
        if not isinstance(metrics, dict) or not all(_is_finite(value) for value in metrics.values()):
            raise Refused("metrics must be finite numbers by name")
        if not all(0 < len(name) <= 100 and name.isprintable() for name in metrics):
            raise Refused("names of metrics must have 1 to 100 printable characters")
        name = _text(body, "conversation") or self._named_in(CONVERSATION)
        if not name:
            raise Refused(f"conversation is missing: name the one that the reward is for, here or in {CONVERSATION}")
        talk: OpenConversation = self._open.host.reward(name, reward, metrics)
        found = {"conversation": talk.name, "sample": talk.place.episode, "turns": talk.turns.turns}
        return {"ok": True, **found, "state": talk.state}

    def _object(self, *, known: set[str]) -> dict[str, Any]:
        body = self._body() if self.headers.get("content-length", "0") != "0" else {}
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        if unknown := sorted(set(body) - known):
            raise Refused(f"{', '.join(unknown)} is not known (known: {', '.join(sorted(known))})")
        return body


class _Turn:
    """A request while it is sampled, and its answer."""

    def __init__(
        self,
        server: OpenServer,
        choices: Choices,
        talks: Sequence[OpenConversation],
        echoed: Sequence[EchoedPrompt],
        as_items: bool,
    ):
        self.choices, self.talks = choices, talks
        self._server, self._echoed, self._as_items = server, echoed, as_items
        self._head: dict[str, Any] = {"id": new_name(), "created": int(time.time()), "model": MODEL}

    @property
    def is_one(self) -> bool:
        """True where all choices are of one conversation."""
        return len({talk.name for talk in self.talks}) == 1

    def leave(self) -> None:
        """Withdraw what is not answered yet."""
        for talk, request in zip(self.talks, self.choices.requests, strict=True):
            if request.index not in self.choices.answers:
                self._server.host.gone(talk, request)

    def whole(self) -> dict[str, Any]:
        """Return the body of the complete answer, with the conversation of each choice."""
        tokens, head = self._server.tokens, self._head
        whole = self.choices.whole(
            head["id"], form=tokens.form, created=head["created"], text_of=tokens.text_of, echoed=self._echoed
        )
        versions = [response.policy_version for response in self.choices.responses]
        for choice, talk, version in zip(whole["choices"], self.talks, versions, strict=True):
            choice |= {"conversation": talk.name, "policy_version": version}
        return {**whole, **self._names, "policy_version": min(versions)}

    @property
    def _names(self) -> dict[str, Any]:
        names = [talk.name for talk in self.talks]
        return {"conversation": names[0]} if self.is_one else {"conversations": names}

    def events(self) -> Iterator[str]:
        """Wait for the first token, and return the events of the answer while it is sampled; after a prompt with its log-probs,
        when it is whole. Raises: Refused before the first event."""
        asked = self.choices.asked
        begun = [] if asked.echo and asked.with_logprobs else [self.choices.next(self.leave)]
        head: dict[str, Any] = {**self._head, **self._names}
        if begun and (version := _version(begun[0][1])) is not None:
            head["policy_version"] = version
        chat = asked.messages is not None
        events = events_of(head, chat=chat, as_items=self._as_items, with_usage=asked.with_usage)
        if begun:
            return self._live(begun[0], events)
        self.choices.wait(self.leave)
        return in_one_piece(self.whole(), events)

    def _live(self, found: tuple[int, TurnAnswer | Unfinished], events: AnswerEvents) -> Iterator[str]:
        """Yield the events of an answer while it is sampled; ``found`` is what came first."""
        asked, tokens = self.choices.asked, self._server.tokens
        echoes = [each.text for each in self._echoed] * asked.answers
        live = LiveAnswer(
            events,
            asked,
            asked.answers,
            form=tokens.form,
            decode=tokens.decode,
            text_of=tokens.text_of,
            echoes=echoes,
        )
        try:
            yield from live.begin()
            while True:
                index, progress = found
                if isinstance(progress, Unfinished):
                    yield from live.grown(index, progress)
                elif progress.response is not None:
                    yield from live.ended(index, progress.response)
                if self.choices.complete:
                    break
                found = self.choices.next(self.leave)
        except Refused as refused:
            self.leave()
            yield failed(str(refused), refused.status)
            return
        yield from live.end(self.whole())


def _version(found: TurnAnswer | Unfinished) -> int | None:
    """The weights that a turn begins with."""
    if isinstance(found, Unfinished):
        return found.spans[0].version
    return None if found.response is None else found.response.policy_version


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    return _checked("" if value is None else value, name)


def _checked(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable() or not value.isascii():
        raise Refused(f"{name} must be a text of up to 200 printable ASCII characters")
    return value


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _wrong_host() -> Any:
    raise Refused("this endpoint has another host name", 421)
