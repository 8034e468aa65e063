"""The other side of a game taken by a server: what it reads, and what becomes of an episode when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from posttrain.envs.nim import nim
from posttrain.envs.served_player import PlayerFailed, served_player
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep


class Server(ThreadingHTTPServer):
    answers: list[str]
    asked: list[dict[str, Any]]
    tokens: set[str]
    status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send({"data": [{"id": "frozen"}]})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        content = self.server.answers.pop(0)
        self._send({"choices": [{"message": {"content": content}}]} if content else {"choices": []})

    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked, server.tokens = [], [], set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def begun(server: Server, **served: Any) -> tuple[Any, list[Any]]:
    env: Any = nim(
        EnvSpec(name="nim"), stones=9, begins="opponent", opponent="served", served={"url": url_of(server), **served}
    )
    events: list[Any] = []
    env.begin(7, events.append)
    return env, events


def test_the_server_reads_its_own_side_of_the_game(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPONENT", "secret")
    server.answers = ["I take 2", "3"]
    env, events = begun(server, token_env="OPPONENT", max_tokens=5, temperature=0.5)
    [asked] = events
    assert isinstance(asked, EnvAsk) and asked.trained and asked.messages[0]["content"].endswith("I take 2. 7 left.")
    env.answer(asked.turn, "3", cut=False, prompt_tokens=1, response_tokens=1)  # 4 left; it takes 3
    assert [message["role"] for message in server.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert server.asked[1]["messages"][2]["content"] == "I take 3. 4 left."
    first = {key: server.asked[0][key] for key in ("model", "max_tokens", "temperature")}
    assert first == {"model": "frozen", "max_tokens": 5, "temperature": 0.5} and server.tokens == {"Bearer secret"}
    assert server.asked[0]["seed"] != server.asked[1]["seed"]
    env.answer(events[-1].turn, "1", cut=False, prompt_tokens=1, response_tokens=1)
    assert events[-1] == EnvStep(done=True, stop="solved", reward=1.0)


def test_an_illegal_move_of_the_server_loses_and_no_answer_fails_the_episode(server: Server) -> None:
    server.answers = ["17", "17"]
    env, events = begun(server)  # the player has had no turn, so the first one takes one stone
    assert events[0].messages[0]["content"].endswith("I take 1. 8 left.")
    env.answer(events[0].turn, "1", cut=False, prompt_tokens=1, response_tokens=1)
    assert events[-1] == EnvStep(done=True, stop="opponent_illegal", reward=1.0)
    server.answers = [""]
    [failure] = begun(server)[1]
    assert isinstance(failure, PlayerFailed) and "holds no choices[0].message.content" in str(failure)
    server.status = 401
    [failure] = begun(server)[1]
    assert isinstance(failure, PlayerFailed) and "status 401" in str(failure)


def test_settings_that_cannot_be_are_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "needs served.url"),
        ({"url": "localhost:8000"}, "served.url is 'localhost:8000'"),
        ({"url": "http://h/v1", "modle": "x"}, "no option 'modle'"),
        ({"url": "http://h/v1", "timeout_s": 0}, "served.timeout_s is 0"),
        ({"url": "http://h/v1", "max_tokens": "5"}, "served.max_tokens is '5'"),
        ({"url": "http://h/v1", "temperature": -1}, "served.temperature is -1"),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
            served_player(options, "served")
    with pytest.raises(ConfigError, match="no effect with the opponent random"):
        nim(EnvSpec(name="nim"), opponent="random", served={"url": "http://h/v1"})
