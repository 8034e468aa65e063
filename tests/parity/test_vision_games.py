"""Runs in environments that show pictures: the trainer reads what the sampler has read, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.cli.request import other_file_problems
from posttrain.config import RunConfig
from posttrain.errors import UnreadImages
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.plan.checks.train import check, unsupported


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("tiny_vision"), "qwen2_vl")


def game(folder: Path, model: Path, **changes: dict[str, Any]) -> RunConfig:
    """One step of two rooms x three episodes of three turns."""
    settings = {"pictures": True, "pixels_per_cell": 8, "instruction": "Go.", "template": "{observation} move"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": 1, "total_steps": 1, "folder": str(folder)},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [], "prompts_per_step": 2},
        "environment": {"name": "sokoban", "train_episodes": 4, "max_turns": 3, "workers": 0, "settings": settings},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 4},
        "policy": {"sequences_per_micro_batch_per_device": 4},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    merged = {name: section | changes.get(name, {}) for name, section in sections.items()}
    return RunConfig.model_validate({**changes, **merged})


@pytest.mark.parametrize("changes", [{}, {"environment": {"sample_per_turn": True}}], ids=["episode", "turn"])
def test_the_trainer_reads_the_pictures_of_all_turns(tmp_path: Path, model: Path, changes: dict[str, Any]) -> None:
    train_run(game(tmp_path / "run", model, **changes))
    [line] = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    # Log-probs of the trainer and of the sampler: with a picture left out, or in another place, they differ by 0.01 and more.
    assert metrics["gap/max"] < 1e-4
    assert metrics["episode/turns_mean"] == 3.0
    sample = json.loads((tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()[0])
    assert [(each["width"], each["height"]) for each in sample["images"]] == [(48, 48)] * 3  # a picture per turn


def test_a_written_image_token_ends_the_episode_and_no_run(tmp_path: Path) -> None:
    """SmolVLM's image token is one of few in the tiny vocabulary, and a random model writes it soon."""
    model = write_tiny_vision_model(tmp_path / "model", "smolvlm")
    train_run(game(tmp_path / "run", model, rollout={"max_response_tokens": 10}, reward={"max_invalid_share": 1.0}))
    [line] = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/invalid/image_token"] > 0 and metrics["gap/max"] < 1e-4


def test_a_model_without_eyes_is_told(tmp_path: Path, tiny_llama: Path) -> None:
    """By the first picture, in one error: every other episode would fail alike."""
    with pytest.raises(UnreadImages, match="the model reads text only; choose a Qwen2-VL"):
        train_run(game(tmp_path / "run", tiny_llama))


def test_plan_refuses_pictures_before_a_model_of_text(tmp_path: Path, model: Path, tiny_llama: Path) -> None:
    assert not other_file_problems(game(tmp_path / "run", model))
    [problem] = other_file_problems(game(tmp_path / "run", tiny_llama))
    assert (problem.field, problem.what.partition(", and")[0]) == ("model.path", "environments show pictures")
    assert not other_file_problems(game(tmp_path / "run", tiny_llama, environment={"settings": {"pictures": False}}))


def test_what_reads_no_pictures_is_refused_by_plan(tmp_path: Path, model: Path) -> None:
    fields = {
        "environment.conversation": game(tmp_path, model, environment={"conversation": "one_message"}),
        "critic.engine": game(tmp_path, model, advantage={"name": "gae"}, critic={"engine": "megatron"}),
        "tracking.batches_every_steps": game(tmp_path, model, tracking={"batches_every_steps": 1}),
    }
    for field, config in fields.items():
        assert [problem.field for problem in check(config) if "pictures" in problem.what] == [field]
    [problem] = [
        each for each in unsupported(game(tmp_path, model, policy={"engine": "megatron"})) if "pictures" in each.what
    ]
    assert problem.field == "policy.engine"
