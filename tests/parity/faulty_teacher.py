"""A teaching server with faults: python faulty_teacher.py FOLDER MODEL

Writes its port to FOLDER/port, and reads before every answer the fault that FOLDER/fault names.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Places = list[Any]
FROM = 9  # the first answers are right, so that a step is trained
# By name: what becomes of the places of a prompt
WRONG: dict[str, Callable[[Places], Places]] = {
    "one too few": lambda places: places[:-1],
    "one too many": lambda places: [*places, places[-1]],
    "shifted": lambda places: [None, *places[2:], places[-1]],
    "not a number": lambda places: [None, *({key: {"logprob": float("nan")} for key in place} for place in places[1:])],
    "certain": lambda places: [None, *({key: {"logprob": 0.0} for key in place} for place in places[1:])],
    "another vocabulary": lambda places: [
        None,
        *({str(int(key) + 7): place[key] for key in place} for place in places[1:]),
    ],
}
RAW = {"a page": b"<html>busy</html>", "nothing": b"", "null": b"null"}


class Answers(BaseHTTPRequestHandler):
    folder: Path
    model: Any
    tokenizer: Any
    turn = threading.Lock()
    asked = 0  # since the fault changed

    def do_GET(self) -> None:
        self._say(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            self._say(json.dumps({"tokens": ids}).encode())
            return
        with self.turn:
            Answers.asked += 1
            number, fault = self.asked, (self.folder / "fault").read_text()
            places = self._graded(body["prompt"], body["prompt_logprobs"])
        sometimes, late = number % 3 == 0, number >= FROM
        if fault == "status 500" and sometimes:
            self._say(b"{}", 500)
        elif fault == "half an answer" and sometimes:
            data = self._answer(places)
            self._say(data[: len(data) // 2], length=len(data))
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "the end" and late:
            os._exit(1)
        elif late and fault in RAW:
            self._say(RAW[fault])
        else:
            self._say(self._answer(WRONG[fault](places) if late and fault in WRONG else places))

    def _graded(self, ids: list[int], k: int) -> Places:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        listed = [{token, *row.topk(k).indices.tolist()} for token, row in zip(ids[1:], logprobs, strict=False)]
        return [
            None,
            *({str(t): {"logprob": row[t].item()} for t in each} for each, row in zip(listed, logprobs, strict=False)),
        ]

    def _answer(self, places: Places) -> bytes:
        return json.dumps({"choices": [{"prompt_logprobs": places}]}).encode()

    def _say(self, data: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    Answers.folder = folder = Path(sys.argv[1])
    Answers.model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
    Answers.tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    known, started = folder / "port", folder / "started"
    server = ThreadingHTTPServer(("127.0.0.1", int(known.read_text()) if known.exists() else 0), Answers)
    if not known.exists():  # a server that starts again has the port of the first
        known.write_text(str(server.server_port))
    started.write_text("")
    server.serve_forever()


if __name__ == "__main__":
    main()
