"""``posttrain serve``: what is wrong is told before anything starts; a real endpoint answers and stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from posttrain.build.serve import models_of, names_of
from posttrain.cli.serve import with_models
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import SERVE
from posttrain.errors import RequestError
from posttrain.run import export
from warm.processes import WarmProcess


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


def test_models_of_the_command_line_become_settings(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "export_checkpoint", lambda run, out: shutil.copytree(tiny_llama, out))
    with ExitStack() as folders:
        words = with_models([str(tiny_llama), "endpoint.port=0"], "org/base", folders)
        assert words == ["endpoint.port=0", f'model.path="{tiny_llama}"', 'endpoint.beside="org/base"']
        assert with_models(["run.yaml", "a=1"], None, folders) == ["run.yaml", "a=1"]
        with pytest.raises(RequestError, match=r"two models are named: .* and model.path=...; keep one"):
            with_models([str(tiny_llama), "model.path=other"], None, folders)
        with pytest.raises(RequestError, match=r"there is no file lost\.gguf"):
            with_models(["lost.gguf"], None, folders)
        with pytest.raises(RequestError, match="there is no folder /lost/model"):
            with_models([str(tiny_llama)], "/lost/model", folders)
        run = tmp_path / "runs, all/sums"
        run.mkdir(parents=True)
        [model, beside] = with_models([str(run)], str(tiny_llama), folders)
        exported = Path(json.loads(model.removeprefix("model.path=")))
        assert exported.name == "sums" and (exported / "config.json").is_file()
        assert beside == f'endpoint.beside="{tiny_llama}"'
    assert not exported.exists()


def test_a_second_model_and_engines_that_serve_one() -> None:
    assert said("model.path=m", "endpoint.beside=n") == []
    beside = ("model.path=m", "endpoint.beside=n")
    assert "rollout.engine=hf" not in " ".join(said(*beside, "rollout.engine=hf"))
    assert "rollout.engine=http serves one model" in " ".join(said(*beside, "rollout.engine=http"))
    loaded = read_config(None, [*beside, "endpoint.api=tinker"], "native", entry=SERVE)
    assert any("endpoint.beside: no effect with endpoint.api=tinker" in text for text in loaded.warnings)
    config = read_config(None, ["model.path=a/m", "endpoint.beside=b/m"], "native", entry=SERVE).config
    assert names_of(config) == ["m", "m (beside)"]
    cached = "endpoint.beside=/cache/models--org--base/snapshots/0a1b"
    assert names_of(read_config(None, ["model.path=a/m", cached], "native", entry=SERVE).config) == ["m", "base"]
    assert [each.model.path for each in models_of(config)] == ["a/m", "b/m"]


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
    process = WarmProcess(
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
