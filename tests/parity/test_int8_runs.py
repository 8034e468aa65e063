"""Runs that sample with weights of eight bits: the gap is measured and corrected for, and every sync rounds the weights again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray_runs import config, lines_of
from test_async_runs import RAGGED

from posttrain.backends.rollout.native import int8
from posttrain.build.train import train_run

pytestmark = pytest.mark.slow

# Weights move far in a step: those of a step before would be found out by the gap.
MOVING: dict[str, Any] = {"sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 0.03}}
APART: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "separate", "max_staleness_steps": 0},
    "rollout": RAGGED | {"devices": [1], "samples_per_prompt": 4, "weights": "int8"},
    "policy": MOVING | {"devices": [0]},
    "reference": {"devices": [0]},
}


@pytest.mark.parametrize("mode", ["off", "colocate"])
def test_a_run_on_one_device(tmp_path: Path, tiny_llama: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    quantize = int8.quantize
    monkeypatch.setattr(int8, "quantize", lambda weight: rounded.append(1) or quantize(weight))
    changes: dict[str, dict[str, Any]] = {
        "policy": MOVING,
        "rollout": {"weights": "int8"},
        "asynchronous": {"mode": mode},
    }
    if mode == "colocate":
        changes["asynchronous"]["max_staleness_steps"] = 1
        changes["policy"] = MOVING | {"optimizer": {"lr": 1e-3}}  # the gap is also that of a step
        changes["rollout"] |= RAGGED | {"samples_per_prompt": 4}
    folder = train_run(config(tmp_path, tiny_llama, "run", changes))
    exact = train_run(config(tmp_path, tiny_llama, "exact", {"policy": MOVING}))
    assert len(rounded) >= 3 * 9  # two layers of four products and the head, for every sync
    check_gaps(folder)
    for line in lines_of(exact):
        assert line["gap/mean"] < 1e-5 and "correction/weight_mean" not in line


def test_samplers_apart_round_what_they_are_sent(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    place = {"placement": {"devices": 2, "ray_address": address, "runtime": "ray"}}
    check_gaps(train_run(config(tmp_path, tiny_llama, "run", APART | place)))


def check_gaps(folder: Path) -> None:
    lines = lines_of(folder)
    assert len(lines) >= 3
    for line in lines:
        if "gap/mean" in line:
            assert 1e-4 < line["gap/mean"] < 0.15
            assert 0.5 < line["correction/weight_mean"] < 1.5 and line["correction/weight_max"] <= 2.0
    assert any("gap/mean" in line for line in lines)
