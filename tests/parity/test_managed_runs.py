"""A run of a fork's launch script whose episodes an environment manager plays: as its own function makes it, and reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from numpy.random import RandomState
from tests.managed_fork import managed_fork

from posttrain.build.train import train_run
from posttrain.cli.request import load_request

pytestmark = pytest.mark.slow


def trained(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics of two steps, and the samples of the first."""
    managed_fork(folder, model=str(model), estimator=estimator)
    monkeypatch.chdir(folder)
    loaded = load_request(["run.sh"], None, here=True)
    train_run(loaded.config)
    read = [
        [json.loads(line) for line in (folder / "out" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples/step_1.jsonl")
    ]
    return [each for each in read[0] if each["step"]], read[1]


def test_a_fork_trains_with_the_rewards_of_its_own_environment(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, samples = trained(tmp_path / "one", tiny_llama, monkeypatch, "gigpo")
    assert [each["step"] for each in steps] == [1, 2] and len(samples) == 6
    # the hidden letters of two starts: seeds 7 and 8
    hidden = ["abcd"[RandomState(seed).randint(4)] for seed in (7, 8)]
    for place, sample in enumerate(samples):
        actions = [turn["text"].strip()[:1] for turn in sample["turns"]]
        won = [action == hidden[place // 3] for action in actions]
        assert sample["reward"] == sum(won) and not any(won[:-1])
        assert len(won) == 3 or won[-1]
        assert sample["environment"]["metrics"]["invalid_actions"] == sum(each not in [*"abcd"] for each in actions)
    again, _ = trained(tmp_path / "two", tiny_llama, monkeypatch, "gigpo")
    same = ("reward/mean", "policy/loss", "environment/invalid_actions")
    assert [[each[name] for name in same] for each in again] == [[each[name] for name in same] for each in steps]


def test_an_invalid_action_has_its_own_penalty_in_a_group(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, _ = trained(tmp_path, tiny_llama, monkeypatch, "grpo")
    assert len(steps) == 2 and any(each["policy/grad_norm"] > 0 for each in steps)


def test_a_fork_trains_with_the_estimator_inside_its_trainer(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, samples = trained(tmp_path, tiny_llama, monkeypatch, "ranked")
    assert [each["step"] for each in steps] == [1, 2] and len(samples) == 6
    assert any(each["policy/grad_norm"] > 0 for each in steps)
