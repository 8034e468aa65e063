"""The tool retrieve, with a server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from posttrain.envs.tools.retrieve import retrieve
from posttrain.errors import ConfigError
from posttrain.interfaces.tool import ToolFailed

ANSWERS = {
    "otter": {"result": [[{"document": {"contents": "The otter swims."}, "score": 0.5}, "A river."]]},
    "nothing": {"result": [[]]},
    "broken": {"results": []},
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict]]]:
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(ANSWERS[asked[-1]["queries"][0]]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *told: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/retrieve", asked
        running.shutdown()
        thread.join()


def test_passages_of_a_server(server) -> None:
    url, asked = server
    tool = retrieve(url=url, results=2, max_characters=9)
    assert tool.run({"query": "otter"}) == "[1] The otter\n\n[2] A river."
    assert asked == [{"queries": ["otter"], "topk": 2, "return_scores": True}]
    assert tool.run({"query": "nothing"}) == "Nothing was found."
    with pytest.raises(ToolFailed, match="holds no list of passages"):
        tool.run({"query": "broken"})


def test_a_server_that_is_not_there_is_told_to_the_model() -> None:
    with pytest.raises(ToolFailed, match="the search failed: no answer from"):
        retrieve(url="http://127.0.0.1:9/retrieve").run({"query": "otter"})
    with pytest.raises(ConfigError, match="url is"):
        retrieve(url="nowhere")
