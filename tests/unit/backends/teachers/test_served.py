"""A teacher in a server gives the numbers that it gives here; a server that is no such teacher is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batches import sequence_batch
from posttrain.backends.serving.protocol import UnusableAnswer
from posttrain.backends.teachers import served
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
                with suppress(ConnectionError):  # the request may be given up
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
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return ServedTeacher("big", TeacherConfig(endpoints=list(urls), **more), tokenizer, len(tokenizer))


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


def places(answer: Any) -> list[Any]:
    listed: list[Any] = answer["choices"][0]["prompt_logprobs"]
    return listed


def best_becomes(value: Any) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        for place in places(answer)[1:]:
            place[max(place, key=lambda token: place[token]["logprob"])]["logprob"] = value
        return answer

    return change


def best_is_called(name: str) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        for place in places(answer)[1:]:
            place[name] = place.pop(max(place, key=lambda token: place[token]["logprob"]))
        return answer

    return change


def every_logprob_is(value: float) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        for place in places(answer)[1:]:
            place.update({token: {"logprob": value} for token in place})
        return answer

    return change


def listed_as(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    return lambda answer: {"choices": [{"prompt_logprobs": change(places(answer))}]}


NONSENSE = {
    "nothing": (lambda answer: {"choices": [{"text": "a"}]}, "gave no prompt_logprobs for 7 tokens; the server must"),
    "an error": (lambda answer: {"error": {"message": "out of memory"}}, "and said: out of memory"),
    "one too few": (listed_as(lambda listed: listed[:-1]), "gave 6 prompt_logprobs for 7 tokens"),
    "a token before": (listed_as(lambda listed: [None, *listed]), "gave 8 prompt_logprobs for 7 tokens"),
    "shifted": (listed_as(lambda listed: [*listed[1:], listed[-1]]), "gave no log-prob of token 192, which is token 3"),
    "nulls": (listed_as(lambda listed: [None] * len(listed)), "gave no log-probs at token 3"),
    "null": (best_becomes(None), "gave null as the log-prob of token"),
    "a truth value": (best_becomes(False), "gave false as the log-prob of token"),
    "a text": (best_becomes("-1"), 'gave "-1" as the log-prob of token'),
    "a probability": (best_becomes(0.5), "gave 0.5 as the log-prob"),
    "infinite": (best_becomes(-1e30), r"gave -1e\+30 as the log-prob"),
    "larger than a float": (best_becomes(-(10**400)), "gave -1000"),
    "all certain": (every_logprob_is(0.0), r"probabilities that sum to [24] at token 3"),
    "all impossible": (every_logprob_is(-9999.0), "gave -9999 as the largest log-prob at token 3"),
    "a name": (best_is_called("the"), "listed 'the' in place of a token id"),
    "no decimal digit": (best_is_called("²"), "listed '²' in place of a token id"),
    "an endless id": (best_is_called("1" * 5000), "listed '1111"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_answers_that_cannot_be_right_are_refused(
    serve: Any, batch: SequenceBatch, tiny_llama: Path, name: str
) -> None:
    change, message = NONSENSE[name]
    url = serve(lambda path, answer: change(answer) if path == "/v1/completions" else answer)
    asked = teacher(tiny_llama, url)
    named = rf"the server of the teacher big, http://127.0.0.1:\d+, .*{message}"
    with pytest.raises(UnusableAnswer, match=named):
        asked.logprobs(batch, 1.0)
    with pytest.raises(UnusableAnswer, match=named):
        asked.top_logprobs(batch, 1.0, 3)


def test_a_hanging_server_has_an_end(
    serve: Any, batch: SequenceBatch, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(at: str) -> str:
        def late(path: str, answer: Any) -> Any:
            time.sleep(1.0 if path == at else 0.0)
            return answer

        return str(serve(late))

    asked = teacher(tiny_llama, hang("/v1/completions"), timeout_s=0.2)
    with pytest.raises(RunStopped, match=r"no response within distillation\.teachers\.big\.timeout_s = 0\.2 s"):
        asked.logprobs(batch, 1.0)
    monkeypatch.setattr(served, "START_S", 0.2)
    with pytest.raises(ModelError, match=r"does not tell its tokenizer \(no answer within 0\.2 s\)"):
        teacher(tiny_llama, hang("/tokenize"))
    with pytest.raises(RunStopped, match=r"/v1/models did not answer within 0\.2 s"):
        teacher(tiny_llama, hang("/v1/models"))


def test_a_server_that_comes_later_is_compared(serve: Any, batch: SequenceBatch, tiny_llama: Path) -> None:
    """The first server dies, and the second, which was not there at the start, has another tokenizer."""
    away = {"first": False, "second": True}

    def first(path: str, answer: Any) -> Any:
        return 500 if away["first"] else answer

    def second(path: str, answer: Any) -> Any:
        if away["second"]:
            return 500
        return {"tokens": [1, 2]} if path == "/tokenize" else answer

    asked = teacher(tiny_llama, serve(first), serve(second))
    assert asked.logprobs(batch, 1.0).isfinite().all()
    away.update(first=True, second=False)
    asked._replicas.all[0].current = False  # as after a broken connection
    with pytest.raises(ModelError, match="has another tokenizer; it makes 2 tokens"):
        asked.logprobs(batch, 1.0)


def test_no_server_and_no_key(serve: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunStopped, match=r"no server of the teacher big is left: no answer from http://127\.0\.0\.1:1"):
        teacher(tiny_llama, "127.0.0.1:1")
    url = serve(key="abc")
    with pytest.raises(ConfigError, match="the environment variable TEACHER_KEY is not set"):
        teacher(tiny_llama, url, api_key_variable="TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "abc")
    teacher(tiny_llama, url, api_key_variable="TEACHER_KEY")
