"""The package as a library makes the run that the command makes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain
from posttrain.cli.app import main
from posttrain.errors import RequestError

REWARD = "def score(prompt, response): return float(len(response) % 3)\n"


@pytest.fixture
def file(tmp_path: Path, tiny_llama: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "ground_truth": "0"} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "run": {"seed": 1, "total_steps": 2},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}]},
        "policy": {"optimizer": {"lr": 1e-3}},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    return tmp_path / "run.yaml"


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps, without those of the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "speed/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def test_a_run_in_a_thread_is_that_of_the_command(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[posttrain.Run] = []

    def train() -> None:
        runs.append(posttrain.train(file, {"run.folder": str(tmp_path / "library")}))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(120)
    [run] = runs
    monkeypatch.setattr("sys.argv", ["posttrain", "train", str(file), f"run.folder={tmp_path / 'command'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    for ours, theirs in zip(steps(run.folder), steps(tmp_path / "command"), strict=True):
        assert {name: value for name, value in ours.items() if theirs.get(name) != value} == {}

    table = run.metrics
    assert table.column("step").to_pylist() == [1, 2]
    assert table.column("reward/mean").to_pylist() == list(run.metric("reward/mean").values())
    with pytest.raises(RequestError, match="did you mean reward/mean"):
        run.metric("reward/meen")
    assert len(run.samples(2)) == 6 and {"prompt", "response", "reward"} <= run.samples(2)[0].keys()
    with pytest.raises(RequestError, match="steps with samples: 1, 2"):
        run.samples(3)
    assert run.checkpoints == [2] and run.info["status"] == "done"
    model, tokenizer = run.model()
    ids = tokenizer("1+1=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
