"""Whole runs whose prompts hold images: reproducible, resumable, exported, and refused where something reads text only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from posttrain.build.generate import generate_run
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.config.generate import GenerateConfig
from posttrain.data.shapes import Difficulty, write_shapes
from posttrain.errors import ConfigError, ModelError
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.run.export import export_checkpoint

Make = Callable[..., RunConfig]

REWARD = (
    "def score(data_source, solution_str, ground_truth, extra_info):\n    return sum(solution_str.encode()) % 5 / 4\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("tiny_vision"), "qwen2_vl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return write_shapes(
        folder, train_rows=8, validation_rows=2, seed=1, difficulty=Difficulty(max_shapes=4, kinds=1, size=24)
    )


@pytest.fixture
def make(tmp_path: Path, model: Path, files: tuple[Path, Path]) -> Make:
    """Two steps of two prompts x three samples; keyword arguments change sections."""
    (tmp_path / "reward.py").write_text(REWARD)
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": 1, "total_steps": 2},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [str(files[0])], "validation_files": [str(files[1])], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 4},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}]},
        "loss": {"kl_coef": 0.01},
        "policy": {"sequences_per_mini_batch": 6, "sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 1e-3}},
        "validation": {"every_steps": 2},
        "checkpoint": {"every_steps": 1},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, **changes: dict[str, Any]) -> RunConfig:
        merged = {name: section | changes.get(name, {}) for name, section in sections.items()}
        merged |= {name: section for name, section in changes.items() if name not in merged}
        merged["run"] = merged["run"] | {"folder": str(tmp_path / folder)}
        return RunConfig.model_validate(merged)

    return make_config


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def comparable(folder: Path) -> str:
    """metrics.jsonl without times and speeds, as text."""
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines_of(folder)]
    return "\n".join(json.dumps(line, sort_keys=True) for line in kept)


@pytest.mark.slow
def test_two_runs_are_the_same_and_a_resumed_one_is_too(make: Make, tmp_path: Path) -> None:
    train_run(make("one"))
    train_run(make("two"))
    assert comparable(tmp_path / "one") == comparable(tmp_path / "two")
    last = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()][-1]
    assert last["gap/max"] < 1e-4
    assert last["prompt/distinct_share"] == 1.0  # equal texts, other images
    train_run(make("resumed", run={"total_steps": 1}))
    train_run(make("resumed"), allow_config_change=True)
    newest = "checkpoints/global_step_2/policy/model.safetensors"
    assert (tmp_path / "resumed" / newest).read_bytes() == (tmp_path / "one" / newest).read_bytes()


@pytest.mark.slow
def test_samplers_agree(make: Make, tmp_path: Path) -> None:
    """Greedy responses to the validation prompts, before any update."""
    found = []
    for engine in ("native", "hf"):
        train_run(make(engine, rollout={"engine": engine}, run={"total_steps": 1}, validation={"every_steps": 1}))
        rows = (tmp_path / engine / "validation/step_0.tokens.jsonl").read_text().splitlines()[1:]
        found.append([json.loads(row) for row in rows])
    assert [row["token_ids"] for row in found[0]] == [row["token_ids"] for row in found[1]]
    first = [[row["rollout_logprobs"][0] for row in rows] for rows in found]
    assert first[0] == pytest.approx(first[1], abs=2e-4)
    assert max(first[0]) - min(first[0]) > 0.01  # the questions are equal, the pictures are not


def test_an_exported_run_is_a_plain_folder(make: Make, tmp_path: Path) -> None:
    train_run(make("run", model={"freeze_vision": True}))
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    exported: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    started: Any = AutoModelForImageTextToText.from_pretrained(make("run").model.path)
    before = dict(started.named_parameters())
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, before[name]) == ("visual" in name), name
    assert (tmp_path / "out/preprocessor_config.json").is_file()
    assert not (tmp_path / "out/engine.json").exists()


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"rollout": {"engine": "sglang"}}, ["rollout.engine"]),
        ({"reward": {"terms": [], "model": {"path": "x", "own_template": True}}}, ["reward.model.own_template"]),
        ({"policy": {"engine": "megatron"}, "rollout": {"engine": "http"}}, ["rollout.engine", "policy.engine"]),
        ({"tracking": {"trackers": [], "batches_every_steps": 1}}, ["tracking.batches_every_steps"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_reads_text_only_is_refused_before_a_model_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fields: list[str]
) -> None:
    monkeypatch.setattr("posttrain.build.train.RUNTIMES.get", None)  # nobody gets that far
    with pytest.raises(ConfigError, match="images") as refused:
        train_run(make("run", **changes))
    assert [problem.field for problem in refused.value.problems] == fields


def test_freezing_without_a_tower_is_refused(make: Make, tiny_llama: Path, tmp_path: Path) -> None:
    row = {"data_source": "sums", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "text.jsonl").write_text((json.dumps(row) + "\n") * 2)
    data = {"train_files": [str(tmp_path / "text.jsonl")], "validation_files": []}
    config = make(
        "run", model={"path": str(tiny_llama), "freeze_vision": True}, data=data, validation={"every_steps": None}
    )
    with pytest.raises(ModelError, match="no vision tower to freeze"):
        train_run(config)


def test_generation_reads_images(model: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"files": [str(files[1])]},
        "rollout": {"max_response_tokens": 3, "samples_per_prompt": 2},
        "output": {"file": str(tmp_path / "out.parquet")},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    config = GenerateConfig.model_validate(sections)
    assert generate_run(config, on_plan=lambda *counts: None, on_work=lambda *work: None)
    assert (tmp_path / "out.parquet").is_file()
    sections["rollout"]["engine"] = "sglang"
    sections["output"]["file"] = str(tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="the data hold images, which rollout"):
        generate_run(GenerateConfig.model_validate(sections), on_plan=lambda *c: None, on_work=lambda *w: None)
