"""Runs on a model and a data set of the hub: one commit per run, also after the hub has moved on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from tests.hub import Hub, folder_files, point_at, running_hub

import posttrain
from posttrain.errors import RequestError

GIVEN = {
    "model": {"path": "org/tiny", "revision": "v1"},
    "data": {"train_files": ["org/sums"], "validation_files": ["org/sums:test"], "prompts_per_step": 2},
    "rollout": {"samples_per_prompt": 2, "max_response_tokens": 2},
    "reward": {"terms": [{"name": "exact_match"}]},
    "loss": {"kl_coef": 0.01},
    "validation": {"every_steps": 5},
    "checkpoint": {"every_steps": 1},
    "run": {"total_steps": 1, "folder": "run"},
    "placement": {"device": "cpu"},
}


def rows(count: int) -> bytes:
    listed = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "data_source": "sums"} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in listed).encode()


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as served:
        point_at(served.address, monkeypatch)
        served.put("org/tiny", folder_files(tiny_llama), revision="v1")
        served.put("datasets/org/sums", {"train.jsonl": rows(8), "test.jsonl": rows(2)})
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(GIVEN))
        yield served


def test_a_plan_asks_the_hub_nothing(hub: Hub, tmp_path: Path) -> None:
    planned = posttrain.plan("run.yaml")
    assert hub.asked == [] and not (tmp_path / "cache").exists()
    said = "data set org/sums is not in the cache of the hub, and a plan downloads nothing"
    assert said in str(planned) and "hf download org/sums --repo-type dataset" in str(planned)


def test_a_plan_looks_at_what_is_here(hub: Hub, tmp_path: Path) -> None:
    """The data set is not in the cache; the model's folder, the validation file and the reward's file are wrong, or not there."""
    (tmp_path / "model").mkdir()
    wrong = {
        "model.path": "./model",
        "data.validation_files": "[absent.jsonl]",
        "reward.terms": "[{name: f, path: f.py}]",
    }
    with pytest.raises(RequestError) as caught:
        posttrain.plan("run.yaml", [f"{key}={value}" for key, value in wrong.items()])
    said = str(caught.value)
    for each in ("model holds no config.json", "there is no file absent.jsonl", "f.py"):
        assert each in said
    assert posttrain.plan("run.yaml", ["model.path=./model"], look_at_files=False).trains
    assert hub.asked == []


def test_a_data_set_that_cannot_be_had_names_the_setting(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError) as caught:
        posttrain.train("run.yaml")
    said = "nor in the cache of the hub, which cannot be reached (HF_HUB_OFFLINE is set), at run.yaml:"
    assert str(caught.value).startswith("org/sums is neither a file here " + said)
    fix = "hf download org/sums --repo-type dataset --local-dir FOLDER; then data.train_files=[FOLDER/FILE, ...]"
    assert str(caught.value).endswith(fix)


@pytest.mark.slow
def test_a_run_keeps_its_commits(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = hub.refs["org/tiny"]["v1"], hub.refs["datasets/org/sums"]["main"]
    posttrain.train("run.yaml")
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["run"]["hub_commits"] == {"org/tiny@v1": model, "datasets/org/sums": data}
    assert saved["model"]["path"] == "org/tiny@v1"
    assert saved["data"]["train_files"] == ["hf://datasets/org/sums/train.jsonl"]
    assert "8" in str(posttrain.plan("run.yaml"))

    # Both branches move; the run goes on with what it began with, and a new one does not.
    hub.put("org/tiny", {"config.json": b"broken"}, revision="v1")
    newer = hub.put("datasets/org/sums", {"train.jsonl": rows(6), "test.jsonl": rows(2)})
    run = posttrain.train("run.yaml", {"run.total_steps": 2})
    assert run.metrics["step"].to_pylist() == [0, 1, 2]
    assert (
        yaml.safe_load((tmp_path / "run/config.yaml").read_text())["run"]["hub_commits"] == saved["run"]["hub_commits"]
    )

    # Without a network, and from the saved configuration on another path of the cache.
    point_at("http://127.0.0.1:1", monkeypatch)
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved"))
    assert posttrain.train("run/config.yaml", {"run.total_steps": 3}).metrics.num_rows == 4

    point_at(hub.address, monkeypatch)
    with pytest.raises(RequestError, match=r"org--tiny.*at run.yaml"):
        posttrain.train("run.yaml", {"run.folder": "other"})  # the new commit holds no model
    posttrain.train("run.yaml", {"run.folder": "other", "model.revision": model})
    commits = yaml.safe_load((tmp_path / "other/config.yaml").read_text())["run"]["hub_commits"]
    assert commits == {f"org/tiny@{model}": model, "datasets/org/sums": newer}
