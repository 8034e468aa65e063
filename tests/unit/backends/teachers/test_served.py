"""A teacher in a server gives the numbers that it gives here; a server that is no such teacher is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batches import sequence_batch
from posttrain.backends.serving.protocol import UnusableAnswer
from posttrain.backends.teachers.served import ServedTeacher
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.config.distillation import TeacherConfig
from posttrain.errors import ConfigError, ModelError, RunStopped
from posttrain.models.loading import load_causal_lm
from posttrain.records.batches import SequenceBatch

Change = Callable[[str, Any], Any]


@pytest.fixture
def serve(tiny_llama: Path) -> Iterator[Callable[..., str]]:
    """Start a server of the tiny Llama. ``change(path, answer)`` may return another answer, or a status."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    servers: list[ThreadingHTTPServer] = []

    def scored(body: Any) -> list[Any]:
        ids = body["prompt"]
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places: list[Any] = [None]
        for token, row in zip(ids[1:], log_p, strict=False):
            listed = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            places.append({str(each): {"logprob": row[each].item(), "rank": 1} for each in listed})
        return places

    def start(change: Change = lambda path, answer: answer, key: str = "") -> str:
        class Answers(BaseHTTPRequestHandler):
            def _say(self, answer: Any) -> None:
                answer = change(self.path, answer)
                if key and self.headers.get("Authorization") != f"Bearer {key}":
                    answer = 401
                data = b"" if isinstance(answer, int) else json.dumps(answer).encode()
                self.send_response(answer if isinstance(answer, int) else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._say({"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self._say({"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]})
                else:
                    assert body["model"] == "tiny"
                    self._say({"choices": [{"prompt_logprobs": scored(body)}]})

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def batch() -> SequenceBatch:
    mask = torch.tensor([[True, True, False, True], [True, True, False, False], [False] * 4])
    tokens = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(0))
    return sequence_batch(tokens=tokens, prompt_lengths=torch.tensor([3, 1, 2]), response_mask=mask)


def teacher(folder: Path, *urls: str, **more: Any) -> ServedTeacher:
    return ServedTeacher("big", TeacherConfig(endpoints=list(urls), **more), AutoTokenizer.from_pretrained(folder))


def test_its_numbers_are_those_of_the_model_here(serve: Any, batch: SequenceBatch, tiny_llama: Path) -> None:
    served = teacher(tiny_llama, serve(), serve())
    here = LogprobScorer(load_causal_lm(str(tiny_llama), dtype=torch.float32), 2)
    torch.testing.assert_close(served.logprobs(batch, 1.0), here.logprobs(batch, 1.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(served.top_logprobs(batch, 1.0, 3), here.top_logprobs(batch, 1.0, 3), rtol=0, atol=1e-5)


def test_another_tokenizer_is_refused(serve: Any, tiny_llama: Path) -> None:
    def other(path: str, answer: Any) -> Any:
        return {"tokens": answer["tokens"][::-1]} if path == "/tokenize" else answer

    with pytest.raises(
        ModelError, match=r"the teacher cannot grade the student's tokens: http://127.0.0.1:\d+ has ano"
    ):
        teacher(tiny_llama, serve(other))
    silent = serve(lambda path, answer: 404 if path == "/tokenize" else answer)
    with pytest.raises(ModelError, match="does not tell its tokenizer") as caught:
        teacher(tiny_llama, silent)
    assert caught.value.problems[0].field == "distillation.teachers.big.path"
    teacher(tiny_llama, silent, path=str(tiny_llama))  # then the folder's is compared


def test_a_server_without_prompt_logprobs_is_refused(serve: Any, batch: SequenceBatch, tiny_llama: Path) -> None:
    def without(path: str, answer: Any) -> Any:
        return {"choices": [{"text": "a"}]} if path == "/v1/completions" else answer

    with pytest.raises(
        UnusableAnswer, match="the server of the teacher big gave no prompt_logprobs for 7 tokens; the server"
    ):
        teacher(tiny_llama, serve(without)).logprobs(batch, 1.0)


def test_fewer_tokens_than_asked_for_are_refused(serve: Any, batch: SequenceBatch, tiny_llama: Path) -> None:
    def fewer(path: str, answer: Any) -> Any:
        for place in answer["choices"][0]["prompt_logprobs"][1:] if path == "/v1/completions" else ():
            for token in sorted(place)[1:]:
                del place[token]
        return answer

    with pytest.raises(UnusableAnswer, match="gave 1 of the 3 most likely tokens"):
        teacher(tiny_llama, serve(fewer)).top_logprobs(batch, 1.0, 3)


def test_no_server_and_no_key(serve: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunStopped, match=r"no server of the teacher big is left: no answer from http://127\.0\.0\.1:1"):
        teacher(tiny_llama, "127.0.0.1:1")
    url = serve(key="abc")
    with pytest.raises(ConfigError, match="the environment variable TEACHER_KEY is not set"):
        teacher(tiny_llama, url, api_key_variable="TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "abc")
    teacher(tiny_llama, url, api_key_variable="TEACHER_KEY")
