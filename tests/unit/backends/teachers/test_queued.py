"""A teacher of verl's recipe gkd gives the numbers that it gives here; an answer that cannot be right stops the run."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from transformers import AutoModelForCausalLM, AutoTokenizer

from batches import sequence_batch
from posttrain.backends.teachers.queued import QueuedTeacher
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.config.distillation import TeacherConfig
from posttrain.errors import ConfigError, ModelError, RunStopped
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import write_tiny_model
from posttrain.plan.checks.train import check
from posttrain.records.batches import SequenceBatch

Change = Callable[[dict[str, Any]], Any]
LISTED = 5


@pytest.fixture
def serve(tiny_llama: Path) -> Iterator[Callable[..., str]]:
    """Start a server of the tiny Llama as the recipe's proxy and worker are: requests and answers by torch.save, the 5 most
    likely tokens behind every token. ``change`` may return another answer, or bytes."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    context, stop, threads = zmq.Context(), threading.Event(), []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        values, ids, responses = [], [], []
        assert request["max_tokens"] == 1
        for text in request["prompt_token_ids"]:
            with torch.no_grad():
                top = model(torch.tensor([text])).logits[0].log_softmax(-1).topk(LISTED)
            values.append(top.values)
            ids.append(top.indices.int())
            responses.append(torch.tensor([0], dtype=torch.int32))
        return {"responses": responses, "teacher_topk_logprobs": values, "teacher_topk_indices": ids}

    def start(change: Change = lambda found: found) -> str:
        socket = context.socket(zmq.REP)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def work() -> None:
            while not stop.is_set():
                if not socket.poll(50):
                    continue
                found = change(answer(torch.load(io.BytesIO(socket.recv()), weights_only=True)))
                buffer = io.BytesIO()
                torch.save(found, buffer)
                socket.send(found if isinstance(found, bytes) else buffer.getvalue())
            socket.close(0)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield start
    stop.set()
    for thread in threads:
        thread.join()
    context.term()


@pytest.fixture
def batch() -> SequenceBatch:
    mask = torch.tensor([[True, True, False, True], [True, True, False, False], [False] * 4, [True] * 4])
    tokens = torch.randint(0, 256, (4, 7), generator=torch.Generator().manual_seed(0))
    return sequence_batch(tokens=tokens, prompt_lengths=torch.tensor([3, 1, 2, 3]), response_mask=mask)


def teacher(folder: Path, *urls: str, vocabulary: int | None = None, **more: Any) -> QueuedTeacher:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return QueuedTeacher("big", TeacherConfig(endpoints=list(urls), **more), tokenizer, vocabulary or len(tokenizer))


@pytest.mark.parametrize("at_once", [1, 32])
def test_its_numbers_are_those_of_the_model_here(
    serve: Any, batch: SequenceBatch, tiny_llama: Path, at_once: int
) -> None:
    queued = teacher(tiny_llama, serve(), serve(), path=str(tiny_llama), sequences_per_micro_batch_per_device=at_once)
    here = LogprobScorer(load_causal_lm(str(tiny_llama), dtype=torch.float32), 2)
    found, expected = queued.top_logprobs(batch, 1.0, 3), here.top_logprobs(batch, 1.0, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not found[2].any() and not found[0, 2].any()
    with pytest.raises(ConfigError, match="most likely tokens alone"):
        queued.logprobs(batch, 1.0)


def test_what_a_server_cannot_give_stops_the_run(serve: Any, batch: SequenceBatch, tiny_llama: Path) -> None:
    queued = teacher(tiny_llama, serve())
    with pytest.raises(RunStopped, match=r"gives the 5 most likely tokens, and distillation\.top_k is 6"):
        queued.top_logprobs(batch, 1.0, 6)
    short = teacher(tiny_llama, serve(), vocabulary=2)
    with pytest.raises(RunStopped, match="and the student's tokens end at 1"):
        short.top_logprobs(batch, 1.0, 3)


def with_first(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda found: found | {name: [change(found[name][0]), *found[name][1:]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: {"status": "error", "reason": "out of memory"}, "reports an error: out of memory"),
        (lambda found: [1], "reports an error: list"),
        (lambda found: found | {"teacher_topk_indices": []}, "gave no list of 1 teacher_topk_logprobs"),
        (with_first("teacher_topk_logprobs", lambda values: values[1:]), "something else than two tensors"),
        (
            lambda found: {name: [one[1:] for one in each] for name, each in found.items()},
            "1 distributions for 2 tokens",
        ),
        (with_first("teacher_topk_logprobs", lambda values: values + 9), "log-probs that are none"),
        (with_first("teacher_topk_logprobs", lambda values: values * torch.nan), "log-probs that are none"),
        (with_first("teacher_topk_indices", lambda ids: ids - 1000), "names token -"),
        (lambda found: b"\0", "no plain tensors"),
        (lambda found: pickle.dumps(print, protocol=2), "no plain tensors"),
    ],
)
def test_an_answer_that_cannot_be_right_stops_the_run(serve: Any, tiny_llama: Path, change: Change, said: str) -> None:
    with pytest.raises(RunStopped, match=said):
        teacher(tiny_llama, serve(change))


def test_nobody_at_the_address(tiny_llama: Path) -> None:
    with pytest.raises(
        RunStopped, match=r"at tcp://127.0.0.1:9 gave no answer within 0.1 s \(distillation.teachers.big.timeout_s\)"
    ):
        teacher(tiny_llama, "tcp://127.0.0.1:9", timeout_s=0.1)


def test_another_tokenizer_is_refused(serve: Any, tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_tokens(["<of the student alone>"])
    config = TeacherConfig(endpoints=[serve()], path=str(tiny_llama))
    with pytest.raises(ModelError, match="the teacher cannot grade the student's tokens"):
        QueuedTeacher("big", config, tokenizer, len(tokenizer))


def test_a_run_learns_from_it_what_it_learns_from_the_teacher_here(
    serve: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    """Three steps, on responses of the weights before, as in the recipe."""
    student = write_tiny_model(tmp_path / "student", seed=1)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(6)))

    def losses(folder: str, **where: Any) -> list[float]:
        config = RunConfig.model_validate(
            {
                "model": {"path": str(student), "compute_dtype": "float32"},
                "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 3, "extra_columns": ["*"]},
                "rollout": {"samples_per_prompt": 1, "max_response_tokens": 6, "engine": "hf"},
                "reward": {"terms": []},
                "distillation": {
                    "teachers": {"big": where},
                    "enters": "loss",
                    "divergence": {"name": "forward_kl"},
                    "top_k": 4,
                    "top_k_rest": "drop",
                },
                "policy": {"optimizer": {"lr": 1e-3, "eps": 1e-4}},
                "asynchronous": {"mode": "one_step", "max_staleness_steps": 1},
                "checkpoint": {"at_end": False},
                "tracking": {"trackers": []},
                "placement": {"device": "cpu", "cpu_threads": 1},
                "run": {"seed": 1, "total_steps": 3, "folder": str(tmp_path / folder)},
            }
        )
        assert check(config) == []
        lines = (train_run(config) / "metrics.jsonl").read_text().splitlines()
        return [line["policy/loss"] for line in map(json.loads, lines) if line["step"] > 0]

    found = losses("queued", endpoints=[serve()])
    assert found == pytest.approx(losses("here", path=str(tiny_llama)), abs=1e-5)
    assert len(found) == 3 and all(loss > 0.01 for loss in found)
