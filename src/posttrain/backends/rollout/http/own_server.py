"""A server around a user's class, started as ``python -m posttrain.backends.rollout.http.own_server PORT CLASS CONFIG``.

The class is called with a mapping (``engine_options``, and the run's settings of model and sampler) and has

    generate(prompt_ids, sampling_params, request_id) -> (token_ids, log_probs), or an object with these attributes or keys
    load_weights(folder, version)                     -> from a Hugging Face folder; called before the first request

both of which may be coroutine functions, which run concurrently on one event loop. Plain functions are called one at a time.
Log-probs are those of the sampled distribution, in nats.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.libraries.own_code import load

# Fields of a request's body that are passed to the class as sampling parameters.
SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


class OwnServer:
    """A user's object, and the weights that it serves."""

    def __init__(self, where: str, config: Mapping[str, Any]):
        self._object = load(where)(dict(config))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        self._one_at_a_time = threading.Lock()
        self._requests = 0
        self.served = {"version": 0, "content_hash": ""}

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._requests += 1
        known = set(SAMPLING) | {"model", "prompt", "n", "logprobs", "return_token_ids", "return_tokens_as_token_ids"}
        # rollout.engine_sampling.
        more = {name: value for name, value in body.items() if name not in known}
        sampling = {name: body[name] for name in SAMPLING if name in body} | more
        answer = self._call(self._object.generate, list(body["prompt"]), sampling, str(self._requests))
        if isinstance(answer, tuple):
            token_ids, log_probs = answer
            stopped = None
        else:
            token_ids, log_probs, stopped = (_of(answer, name) for name in ("token_ids", "log_probs", "stop_reason"))
        token_ids = [int(token) for token in token_ids or ()]
        log_probs = None if log_probs is None else [float(value) for value in log_probs]
        finish = (
            stopped if stopped in ("stop", "length") else "length" if len(token_ids) >= body["max_tokens"] else "stop"
        )
        choice = {"token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": finish}
        return {"choices": [choice]}

    def update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._call(self._object.load_weights, body["model_path"], body["version"])
        self.served = {name: body[name] for name in ("version", "content_hash")}
        return self.served

    def _call(self, function: Any, *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop).result()
        with self._one_at_a_time:
            return function(*arguments)


def _of(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        own = self.server.own
        answers = {"/health": {}, "/served": own.served, "/v1/models": {"data": [{"id": "own"}]}}
        self._send(answers.get(self.path, {}), 200 if self.path in answers else 404)

    def do_POST(self) -> None:
        routes = {"/v1/completions": self.server.own.complete, "/update": self.server.own.update}
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        try:
            self._send(routes[self.path](body), 200)
        except Exception as error:  # noqa: BLE001 - a user's code; the run gets the message, and the log the traceback
            traceback.print_exc()
            self._send({"error": {"message": f"{type(error).__name__}: {error}"}}, 500)

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: requests are not logged."""

    def _send(self, value: Any, status: int) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, port: int, own: OwnServer):
        super().__init__(("127.0.0.1", port), _Handler)
        self.own = own


def main() -> None:
    port, where, config = sys.argv[1:]
    _Server(int(port), OwnServer(where, json.loads(config))).serve_forever()


if __name__ == "__main__":
    main()
