"""The endpoint over a sampler that is played: tokens, sessions, the record, clients that leave, a sampler that fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from posttrain.backends.endpoint import server
from posttrain.backends.endpoint.app import Endpoint, EndpointPlan
from posttrain.backends.endpoint.driver import Closed, Driver
from posttrain.backends.endpoint.record import Record
from posttrain.config.model import ModelConfig
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.interfaces.rollout_engine import Request
from posttrain.models.loading import load_tokenizer
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, Unfinished

SAMPLING = SamplingParams(max_response_tokens=8)
TOKEN = "secret"


class Played:
    """Answers every request with a reply, one at a time, in the tokens that ``say`` makes of it."""

    def __init__(self, say: Callable[[str], Sequence[int]], end: int, replies: Sequence[str]):
        self.say, self.end, self.replies = say, end, list(replies)
        self.asked: list[Request] = []
        self.waiting: list[Request] = []
        self.cancelled: list[str] = []
        self.hold = threading.Event()
        self.hold.set()

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        if any(request.max_response_tokens > 7 for request in requests):
            raise ValueError("no room for it")
        self.asked += requests
        self.waiting += requests

    def cancel(self, sample_ids: Collection[str]) -> None:
        self.cancelled += sample_ids

    def wait(self, timeout_s: float) -> list[Trajectory]:
        if not self.waiting or not self.hold.wait(timeout_s):
            return []
        request, reply = self.waiting.pop(0), self.replies.pop(0)
        if reply == "broken":
            raise RuntimeError("the sampler broke")
        ids = (*self.say(reply), self.end)
        return [
            Trajectory(
                sample_id=request.sample_id,
                token_ids=ids,
                logprobs=(-0.5,) * len(ids),
                text=reply,
                stop_reason={"failed": StopReason.FAILED, "so; x": StopReason.STOP_TEXT}.get(reply, StopReason.EOS),
                policy_version=4,
                failure="no server" if reply == "failed" else "",
            )
        ]


class Place:
    """An endpoint, its sampler, and a way to talk to it."""

    def __init__(self, model: Path, replies: Sequence[str], record: Path | None, *, samplings: bool = False):
        self.tokenizer = load_tokenizer(ModelConfig(path=str(model)))
        self.engine = Played(self._tokens, self.tokenizer.eos_token_id, replies)
        self.driver = Driver(self.engine, SAMPLING)  # type: ignore[arg-type]
        plan = EndpointPlan(
            model="tiny",
            token=TOKEN,
            sampling=SAMPLING,
            max_prompt_tokens=200,
            honours=Honours(distributions=DISTRIBUTION if samplings else frozenset(), stops=samplings),
            session_header="X-Session-Id",
            max_sessions=2,
            host_names=frozenset({"here"}),
        )
        self.record = Record(record) if record else None
        self.endpoint = Endpoint(plan, self.driver, self.tokenizer, {}, self.record)
        self.app = self.endpoint.app()

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ask(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return asyncio.run(self._ask(path, body, {"Authorization": f"Bearer {TOKEN}"} | headers))

    async def _ask(self, path: str, body: Any, headers: dict[str, str]) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            if body is None:
                return await client.get(path, headers=headers)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    def chat(self, *messages: dict[str, Any], session: str = "", **more: Any) -> dict[str, Any]:
        headers = {"X-Session-Id": session} if session else {}
        response = self.ask("/v1/chat/completions", {"messages": list(messages), "max_tokens": 6, **more}, **headers)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@contextmanager
def placed(
    model: Path, replies: Sequence[str], record: Path | None = None, *, samplings: bool = False
) -> Iterator[Place]:
    place = Place(model, replies, record, samplings=samplings)
    place.driver.start()
    try:
        yield place
    finally:
        place.driver.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_session_goes_on_in_the_tokens_that_were_sampled(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "record.jsonl"
    with placed(tiny_llama, ["one", "two", "three", "four"], file) as place:
        first = place.chat(user("a"), session="s")
        told = first["choices"][0]["message"]
        assert told == {"role": "assistant", "content": "one"}
        place.chat(user("a"), told, user("b"), session="s")
        place.chat(user("a"), {"role": "assistant", "content": "ONE"}, user("b"), session="s")  # not what it was told
        place.chat(user("a"), told, user("b"), session="other")
    asked = place.engine.asked
    ended = (*place._tokens("one"), place.tokenizer.eos_token_id)
    before = (*asked[0].token_ids, *ended)
    assert asked[1].token_ids[: len(before)] == before
    assert asked[0].conversation == asked[1].conversation == "s" and asked[0].sample_id != asked[1].sample_id
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["continues"] for line in lines] == [False, True, False, False]
    assert lines[1]["prompt_token_ids"] == list(asked[1].token_ids)
    assert lines[0]["token_ids"] == list(ended) and lines[0]["logprobs"] == [-0.5] * len(ended)
    assert (lines[3]["session"], lines[0]["policy_version"], lines[0]["stop_reason"]) == ("other", 4, "eos")
    assert lines[1]["messages"] == [user("a"), told, user("b")]


def test_several_answers_and_completions(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["x", "y", "z", "w"]) as place:
        both = place.chat(user("a"), n=2)
        assert [choice["message"]["content"] for choice in both["choices"]] == ["x", "y"]
        tokens = place._tokens("hello")
        assert place.ask("/v1/completions", {"prompt": tokens, "max_tokens": 2}).json()["choices"][0]["text"] == "z"
        assert place.engine.asked[-1].token_ids == tuple(tokens)
        events = place.ask("/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": True}).text
        assert '"text": "w"' in events and events.endswith("data: [DONE]\n\n")
    assert len({request.sample_id for request in place.engine.asked}) == 4


def test_what_is_refused(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["failed", "after"]) as place:

        def refused(path: str, body: Any = None, **headers: str) -> tuple[int, str]:
            response = place.ask(path, body, **headers)
            return response.status_code, response.json()["error"]["message"]

        chat = "/v1/chat/completions"
        assert refused("/v1/models", Authorization="Bearer wrong")[0] == 401
        assert refused(chat, {"messages": [user("a")]}, Authorization="")[0] == 401
        assert refused(chat, b"{")[1].startswith("the body is not JSON")
        assert refused(chat, b" " * ((1 << 20) + 1))[0] == 413
        assert refused(chat, {"messages": [user("a" * 300)]})[1].endswith(
            "and 200 are allowed (data.max_prompt_tokens)"
        )
        assert refused("/v1/completions", {"prompt": [10**6]})[1].startswith("prompt holds a token id outside 0 to")
        other = {"messages": [user("a")], "model": "gpt-4o"}
        assert refused(chat, other) == (404, 'there is no model "gpt-4o"; this endpoint has tiny')
        assert refused("/v1/completions", {"prompt": "a", "model": ["tiny"]})[0] == 404
        assert refused(chat, {"messages": [user("a")], "model": "tiny"})[0] == 400
        assert refused(chat, {"messages": [user("a")]}) == (400, "no room for it")  # 8 tokens, the most by default
        assert refused(chat, {"messages": [user("a")], "max_tokens": 5}) == (502, "the sampler failed: no server")
        assert place.chat(user("a"))["choices"][0]["message"]["content"] == "after"
        assert place.ask("/v1/models").json()["data"] == [place.ask("/v1/models/tiny").json()]
        assert place.ask("/v1/models/tiny").json()["id"] == "tiny"
        assert refused("/v1/models/other") == (404, 'there is no model "other"; this endpoint has tiny')
        assert refused("/v1/models/tiny", Authorization="")[0] == 401
        assert place.ask("/health", Authorization="").json() == {"ok": True}


NEVER = '"\\ud83d"'


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (f'{{"messages": [{{"role": "user", "content": {NEVER}}}]}}', "messages.0.content"),
        (f'{{"messages": [{{"role": {NEVER}, "content": "a"}}]}}', "messages.0.role"),
        (f'{{"messages": [{{"role": "user", "content": "a", {NEVER}: 1}}]}}', "messages.0"),
        (f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{{"a": {NEVER}}}]}}', "tools.0.a"),
        (f'{{"messages": [{{"role": "user", "content": "a"}}], "user": {NEVER}}}', "user"),
        (f'{{"messages": [{{"role": "user", "content": "a"}}], "stop": [{NEVER}]}}', "stop.0"),
        (f"{{{NEVER}: 1}}", "the body"),
    ],
)
def test_half_a_character_is_the_clients_mistake(tiny_llama: Path, body: str, where: str) -> None:
    with placed(tiny_llama, []) as place:
        response = place.ask("/v1/chat/completions", body.encode())
        assert (response.status_code, response.json()["error"]["message"]) == (
            400,
            f"{where} holds half a character, '\\ud83d'",
        )
        assert place.ask("/v1/completions", f'{{"prompt": {NEVER}}}'.encode()).status_code == 400


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *(
            ("here", True),
            ("here:8000", True),
            ("HERE.", True),
            ("127.0.0.1:80", True),
            ("[::1]:80", True),
            ("10.0.0.3", True),
        ),
        *(
            ("evil.example", False),
            ("127.0.0.1.evil.example", False),
            ("[::1", False),
            ("", False),
            ("here.evil.example:80", False),
        ),
    ],
)
def test_a_page_whose_name_resolves_to_this_machine_is_refused(tiny_llama: Path, host: str, allowed: bool) -> None:
    with placed(tiny_llama, []) as place:
        for path, body in (("/health", None), ("/v1/models", None), ("/v1/chat/completions", {})):
            response = place.ask(path, body, Host=host)
            assert (response.status_code != 421) is allowed, path


def test_a_long_prompt_is_refused_unread_and_a_slow_one_blocks_nobody(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["a"]) as place:
        response = place.ask("/v1/completions", json.dumps({"prompt": "a" * (2 << 20)}).encode())
        assert (response.status_code, response.json()["error"]["message"]) == (
            413,
            "the body has more than 1048576 bytes",
        )

        began, may_end = threading.Event(), threading.Event()
        tokenized = place.endpoint._tokenized

        def slow(session: str, asked: Any) -> Any:
            began.set()
            assert may_end.wait(10)
            return tokenized(session, asked)

        place.endpoint._tokenized = slow  # type: ignore[method-assign]

        async def both() -> tuple[int, int]:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            long = asyncio.create_task(place._ask("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers))
            assert await asyncio.to_thread(began.wait, 10)
            short = await asyncio.wait_for(place._ask("/health", None, {}), 5)
            may_end.set()
            return (await long).status_code, short.status_code

        assert asyncio.run(both()) == (200, 200)


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.5)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 6)
    place = Place(tiny_llama, [], None)
    listener = server.listen("127.0.0.1", 0)
    address = listener.getsockname()
    thread = threading.Thread(target=_serve, args=(place, listener), daemon=True)
    thread.start()
    try:
        for said in (b"", b"GET /health HTTP/1.1\r\nHost: he", b"GET /health HTTP/1.1\r\nHost: here\r\n\r\nGET /he"):
            with socket.create_connection(address) as half_open:
                half_open.sendall(said)
                half_open.settimeout(10)
                while half_open.recv(4096):
                    pass  # closed by the endpoint, or the test fails at its deadline
        open_ = [socket.create_connection(address) for _ in range(6)]
        with socket.create_connection(address) as one_more:
            one_more.settimeout(0.3)
            with suppress(ConnectionResetError):
                assert one_more.recv(1) == b""
        for each in open_:
            each.close()
        wait_for(lambda: httpx2.get(f"http://127.0.0.1:{address[1]}/health").status_code == 200)
    finally:
        place.driver.failure = place.driver.failure or None
        place.driver.close()
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


@pytest.mark.slow
def test_requests_without_a_certain_end_are_answered_and_the_connection_closed(tiny_llama: Path) -> None:
    place = Place(tiny_llama, [], None)
    listener = server.listen("127.0.0.1", 0)
    thread = threading.Thread(target=_serve, args=(place, listener), daemon=True)
    thread.start()
    try:
        for headers in (
            "Transfer-Encoding: chunked\r\nContent-Length: 400",
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Content-Length: 5\r\nContent-Length: 400",
        ):
            with socket.create_connection(listener.getsockname()) as client:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
                client.sendall(
                    f"{head}{headers}\r\n\r\n{{}}   GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
                )
                client.settimeout(30)
                answer = b"".join(iter(lambda client=client: client.recv(4096), b""))  # ends with the connection
            assert answer.split()[1] == b"400" and answer.count(b"HTTP/1.") == 1, (headers, answer)
    finally:
        place.driver.close()
        thread.join(10)
        listener.close()


def _serve(place: Place, listener: socket.socket) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.signal, "signal", lambda number, handler: None)  # this is no main thread
        server.serve(place.endpoint.app(), place.driver, listener)


def test_a_sampler_that_breaks_is_told(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["broken"]) as place:
        response = place.ask("/v1/chat/completions", {"messages": [user("a")], "max_tokens": 5})
        assert (response.status_code, response.json()["error"]["message"]) == (503, "the endpoint is closing")
        assert isinstance(place.driver.failure, RuntimeError)
        with pytest.raises(Closed):
            place.driver.submit(Request(sample_id="x", token_ids=(1,), max_response_tokens=1))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_nobody_waits_for_is_given_up(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["late"]) as place:
        place.engine.hold.clear()
        future = place.driver.submit(Request(sample_id="x", token_ids=(1,), max_response_tokens=1))
        wait_for(lambda: bool(place.engine.asked))
        place.driver.give_up("x")
        wait_for(lambda: bool(place.engine.cancelled))
        assert place.engine.cancelled == ["x"] and not future.done()
        waiting = place.driver.submit(Request(sample_id="y", token_ids=(1,), max_response_tokens=1))
    with pytest.raises(Closed):
        waiting.result(timeout=5)


def test_the_responses_api_and_seeds(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["hello", "again"]) as place:
        response = place.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 6})
        assert response.json()["output"][0]["content"][0]["text"] == "hello"
        events = place.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "stream": True}).text
        assert events.startswith("event: response.created") and "event: response.completed" in events
        refused = place.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "seed": 3})
        assert refused.status_code == 400  # this sampler draws by no seed of a request


def test_a_request_samples_as_it_asks_and_the_record_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    with placed(tiny_llama, ["so; x", "b", "c", "d"], file, samplings=True) as place:
        asks = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "stop": ";"}
        first = place.chat(user("a"), session="s", **asks)
        told = first["choices"][0]["message"]
        assert (told["content"], first["choices"][0]["finish_reason"]) == ("so", "stop")
        place.chat(user("a"), told, user("b"), session="s")
        body = {"prompt": "hello", "max_tokens": 2, "n": 2, "temperature": 0}
        assert place.ask("/v1/completions", body).status_code == 200
    asked = [request.sampling for request in place.engine.asked]
    wanted = replace(SAMPLING, temperature=0.25, top_p=0.5, top_k=3, stop=(";",))
    assert asked == [wanted, None, *[replace(SAMPLING, temperature=0)] * 2]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["sampling"] == {"temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.0, "stop": [";"]}
    assert [line["sampling"]["temperature"] for line in lines] == [0.25, 1.0, 0, 0]
    assert lines[0]["text"] == "so; x"
    assert not lines[1]["continues"]  # the client never had what was sampled from the stop text on


def test_a_server_in_a_thread_installs_no_signal_handlers_and_is_stopped(tiny_llama: Path) -> None:
    """Python lets only the main thread install them: a notebook that serves in a thread would end at once."""
    place = Place(tiny_llama, [], None)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stopping, failures = threading.Event(), []

    def serve() -> None:
        try:
            server.serve(place.endpoint.app(), place.driver, listener, stopping)
        except Exception as error:  # noqa: BLE001  # a thread's error is looked at below
            failures.append(error)

    with closing(server.listen("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
        thread = threading.Thread(target=serve)
        thread.start()
        answer = httpx2.get(address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)
        assert (answer.status_code, failures) == (200, [])
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        stopping.set()
        thread.join(10)
        assert not thread.is_alive() and failures == []


def test_several_prompts_of_a_completion_are_echoed_in_order(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["a", "b", "c", "d"]) as place:
        body = {"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 2}
        whole = place.ask("/v1/completions", body).json()
        ids = [tuple(place.tokenizer(text)["input_ids"]) for text in ("one", "two")]
    assert [choice["text"] for choice in whole["choices"]] == ["onea", "oneb", "twoc", "twod"]
    assert [request.token_ids for request in place.engine.asked] == [ids[0], ids[0], ids[1], ids[1]]
    assert whole["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])


class PlayedByToken(Played):
    """Reports a token of every request per call of ``wait``; a request ends with its last one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hold.clear()
        self.begun: dict[str, tuple[list[int], int]] = {}  # tokens of the reply, and how many of them there are so far

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        if not self.hold.wait(timeout_s):
            return []
        self.hold.clear()
        ended = []
        for request in list(self.waiting):
            if request.sample_id in self.cancelled:
                continue
            if request.sample_id not in self.begun:
                self.begun[request.sample_id] = ([*self.say(self.replies.pop(0)), self.end], 0)
            ids, count = self.begun[request.sample_id]
            self.begun[request.sample_id] = (ids, count + 1)
            if count + 1 == len(ids):
                self.waiting.remove(request)
                ended.append(trajectory(request.sample_id, ids, ""))
        return ended

    def progress(self, since: dict[str, int]) -> list[Unfinished]:
        found = []
        for name, first in since.items():
            ids, count = self.begun.get(name, ([], 0))
            if first < count:
                logprobs = (-0.5,) * (count - first)
                found.append(Unfinished(sample_id=name, token_ids=tuple(ids[first:count]), logprobs=logprobs, spans=()))
        return found


def trajectory(name: str, ids: Sequence[int], text: str) -> Trajectory:
    return Trajectory(
        sample_id=name,
        token_ids=tuple(ids),
        logprobs=(-0.5,) * len(ids),
        text=text,
        stop_reason=StopReason.EOS,
        policy_version=4,
    )


class Live(Place):
    """An endpoint whose sampler makes a token when it is told to, on a socket: the other transport sends no parts."""

    def __init__(self, model: Path, replies: Sequence[str], record: Path | None = None):
        super().__init__(model, replies, record)
        self.engine = PlayedByToken(self._tokens, self.tokenizer.eos_token_id, replies)
        self.driver = Driver(self.engine, SAMPLING)  # type: ignore[arg-type]
        self.endpoint = Endpoint(
            replace(self.endpoint.plan, streams=True), self.driver, self.tokenizer, {}, self.record
        )

    @contextmanager
    def asked(self, path: str, body: dict[str, Any], **headers: str) -> Iterator[httpx2.Response]:
        with (
            httpx2.Client(timeout=20) as client,
            client.stream(
                "POST", self.url + path, json=body, headers={"Authorization": f"Bearer {TOKEN}"} | headers
            ) as found,
        ):
            yield found


@contextmanager
def live(model: Path, replies: Sequence[str], record: Path | None = None) -> Iterator[Live]:
    place, stopping = Live(model, replies, record), threading.Event()
    with closing(server.listen("127.0.0.1", 0)) as listener:
        place.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.serve, args=(place.endpoint.app(), place.driver, listener, stopping))
        thread.start()
        try:
            yield place
        finally:
            stopping.set()
            place.engine.hold.set()
            thread.join()


def data_of(lines: Iterator[str]) -> Iterator[Any]:
    """Parse the data of server-sent events as they come."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_the_first_piece_comes_before_the_second_token_is_sampled(tiny_llama: Path, tmp_path: Path) -> None:
    body = {"messages": [user("a")], "max_tokens": 6, "stream": True, "logprobs": True}
    with live(tiny_llama, ["one two"], tmp_path / "r.jsonl") as place:
        ids = [*place._tokens("one two"), place.engine.end]
        place.engine.hold.set()
        with place.asked("/v1/chat/completions", body, **{"X-Session-Id": "s"}) as answer:
            events = data_of(answer.iter_lines())
            pieces = [next(events)]
            assert [count for _, count in place.engine.begun.values()] == [1]  # token, when its piece is here
            while not pieces[-1]["choices"][0]["finish_reason"]:
                place.engine.hold.set()
                pieces.append(next(events))
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
        assert "".join(delta.get("content", "") for delta in deltas) == "one two" and len(deltas) > 2
        logprobs = [one for piece in pieces for one in (piece["choices"][0]["logprobs"] or {"content": ()})["content"]]
        assert [one["token_id"] for one in logprobs] == ids  # each token once
    [line] = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert line["token_ids"] == ids and line["session"] == "s"


def test_a_stream_that_its_client_leaves_is_given_up(tiny_llama: Path) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 6, "stream": True}
    with live(tiny_llama, ["one two", "three four"]) as place:
        place.engine.hold.set()
        with place.asked("/v1/completions", body) as answer:
            assert next(data_of(answer.iter_lines()))["choices"][0]["text"]
        until = time.monotonic() + 10
        while len(place.engine.cancelled) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert sorted(place.engine.cancelled) == ["request-0-0", "request-0-1"]


def test_the_responses_api_in_pieces(tiny_llama: Path) -> None:
    with live(tiny_llama, ["one two"]) as place, ExitStack() as stack:
        place.engine.hold.set()
        body = {"input": "Hi", "max_output_tokens": 6, "stream": True}
        events = data_of(stack.enter_context(place.asked("/v1/responses", body)).iter_lines())
        found = [next(events)]
        while found[-1]["type"] != "response.completed":
            place.engine.hold.set()
            found.append(next(events))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event["delta"] for event in found if event["type"].endswith("text.delta")]
    assert "".join(deltas) == "one two" == found[-1]["response"]["output"][0]["content"][0]["text"] and len(deltas) > 1
