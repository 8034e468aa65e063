"""``posttrain serve``: what is wrong is told before anything starts; a real endpoint answers and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import SERVE


def said(*overrides: str) -> list[str]:
    loaded = read_config(None, list(overrides), "native", entry=SERVE)
    return [str(problem) for problem in [*loaded.problems, *loaded.unsupported]]


def test_what_cannot_be_served() -> None:
    assert said("model.path=m") == []
    assert "there is no rollout engine called 'nativ'" in said("model.path=m", "rollout.engine=nativ")[0]
    assert "an endpoint on 2 devices is planned" in said("model.path=m", "placement.devices=2")[0]
    assert said("model.path=m", "endpoint.prot=1")[0].startswith("there is no key endpoint.prot")


def test_what_is_dangerous_or_without_effect_is_told() -> None:
    loaded = read_config(
        None, ["model.path=m", "endpoint.host=0.0.0.0", "rollout.samples_per_prompt=4"], "native", entry=SERVE
    )
    assert any("can be reached from outside this machine" in text for text in loaded.warnings)
    assert any("each request says how many answers it wants" in text for text in loaded.warnings)


@pytest.mark.slow
def test_an_endpoint_answers_and_stops(tiny_llama: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    (tmp_path / "token").write_text("secret\n")
    arguments = [
        f"model.path={tiny_llama}",
        "model.compute_dtype=float32",
        "endpoint.port=0",
        f"endpoint.token_file={tmp_path / 'token'}",
        f"endpoint.record={record}",
        "rollout.max_response_tokens=8",
        "placement.cpu_threads=1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", "serve", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("OPENAI_BASE_URL=")).strip().partition("=")[2]
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}).encode()
        request = urllib.request.Request(f"{address}/chat/completions", body, {"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert "stopped" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
    [line] = record.read_text(encoding="utf-8").strip().split("\n")
    recorded = json.loads(line)
    assert recorded["text"] == answer["choices"][0]["message"]["content"]
    assert len(recorded["token_ids"]) == len(recorded["logprobs"]) == answer["usage"]["completion_tokens"]
