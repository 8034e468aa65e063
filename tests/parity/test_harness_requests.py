"""Requests as lm-evaluation-harness sends them, answered by a real endpoint: its log-likelihoods are transformers' own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from warm.processes import WarmProcess

pytestmark = pytest.mark.slow
ROWS = (
    {"q": "the cat sat", "choices": ["on", "under the", "a"], "gold": 0},
    {"q": "one two", "choices": ["three", "2", "nine nine nine"], "gold": 0},
)
# One kind of task each: https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md
TASK = """task: rows_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
target_delimiter: " "
"""


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an endpoint of the tiny model."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o600)
    settings = [f"model.path={tiny_llama}", "model.compute_dtype=float32", "endpoint.name=tiny", "endpoint.port=0"]
    settings += [f"endpoint.token_file={folder}/token", "placement.cpu_threads=1", "rollout.max_response_tokens=32"]
    started = WarmProcess([sys.executable, "-m", "posttrain", "serve", *settings], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield next(line for line in started.stdout if line.startswith("OPENAI_BASE_URL=")).strip().partition("=")[2]
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(30)


@pytest.fixture(scope="module")
def likelihood(tiny_llama: Path) -> Callable[[list[int], int], tuple[float, bool]]:
    """The log-likelihood of tokens from a place on, and whether they are the likeliest ones, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def found(ids: list[int], start: int) -> tuple[float, bool]:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(start, len(ids))
        total = sum(logprobs[place - 1, ids[place]].item() for place in places)
        return total, all(int(logprobs[place - 1].argmax()) == ids[place] for place in places)

    return found


def ask(address: str, path: str, body: Any) -> dict[str, Any]:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_recorded_requests_for_log_likelihoods(
    served: str, tiny_llama: Path, likelihood: Callable[[list[int], int], tuple[float, bool]]
) -> None:
    """As local-completions of lm_eval 0.4.13 sends them, prompts as token ids in batches and as text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    pairs = [(row["q"], f"{row['q']} {choice}") for row in ROWS for choice in row["choices"]]  # type: ignore[attr-defined]
    contexts = [len(tokenizer(context)["input_ids"]) for context, _ in pairs]
    whole = [list(tokenizer(text)["input_ids"]) for _, text in pairs]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for prompts in (whole, [text for _, text in pairs]):
        choices = ask(served, "/completions", {**body, "prompt": prompts})["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(pairs)))
        for ids, start, choice in zip(whole, contexts, choices, strict=True):
            logprobs = choice["logprobs"]
            scored = list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[start:-1]
            total = sum(logprob for logprob, _ in scored)
            greedy = all(logprob == max(top.values()) for logprob, top in scored)
            expected, likeliest = likelihood(ids, start)
            assert total == pytest.approx(expected, abs=1e-3) and greedy == likeliest


def test_recorded_requests_for_texts(served: str) -> None:
    """As local-completions and local-chat-completions send them: an answer ends before the first of the texts."""
    more = {"model": "tiny", "max_tokens": 16, "temperature": 0.0, "stop": ["\n", "e"], "seed": 1234}
    [choice] = ask(served, "/completions", {"prompt": [[5, 6, 7]], **more})["choices"]
    assert "e" not in choice["text"] and choice["finish_reason"] in ("stop", "length")
    chat = {"messages": [{"role": "user", "content": "the cat"}], **more}
    [choice] = ask(served, "/chat/completions", chat)["choices"]
    assert choice["index"] == 0 and "e" not in choice["message"]["content"]


def test_the_harness_itself(
    served: str, tiny_llama: Path, tmp_path: Path, likelihood: Callable[[list[int], int], tuple[float, bool]]
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    task = TASK.format(kind="multiple_choice", rows=tmp_path / "rows.jsonl")
    task += 'doc_to_target: "{{gold}}"\ndoc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]\n'
    (tmp_path / "rows.yaml").write_text(task)
    model = f"model=tiny,base_url={served}/completions,tokenizer={tiny_llama},num_concurrent=2"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--log_samples"]
    command += [
        "--tasks",
        "rows_multiple_choice",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OPENAI_API_KEY": "secret", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        row = sample["doc"]
        for choice, [told] in zip(row["choices"], sample["resps"], strict=True):
            ids = list(tokenizer(f"{row['q']} {choice}")["input_ids"])
            expected, likeliest = likelihood(ids, len(tokenizer(row["q"])["input_ids"]))
            assert float(told[0]) == pytest.approx(expected, abs=1e-3) and str(told[1]) == str(likeliest)
