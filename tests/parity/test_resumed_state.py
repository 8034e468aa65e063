"""Runs that died and were started again, for every state that a setting adds to a checkpoint: the same result, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_runs import Make, PowerCut, assert_same_result, at_step, maker, metrics_of, power_cut

from posttrain.build.train import train_run

Sections = dict[str, dict[str, Any]]

STATES: dict[str, Sections] = {
    "a reference that moves": {"reference": {"update_every": 2, "update_mix": 0.3}},
    "a reference replaced after each epoch": {"reference": {"update_every": "epoch"}},
    "sgd": {"policy": {"optimizer": {"name": "sgd", "lr": 0.1}}},
    "sgd with momentum": {"policy": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}},
    "muon": {"policy": {"optimizer": {"name": "muon", "lr": 1e-3}}},
    "a KL over the vocabulary in the reward": {"reward": {"kl": {"coef": 0.1, "estimator": "full", "target": 0.01}}},
    "float16": {"model": {"compute_dtype": "float16"}},
    "drawn mini-batches": {"policy": {"shuffle": True, "epochs_per_step": 2}},
}


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    return maker(tmp_path, tiny_llama)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_a_run_that_died_resumes_exactly(make: Make, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Dead in step 5; the checkpoint is of step 3."""
    plain = make("x")
    sections: Sections = {
        name: section
        if name not in ("policy", "model")
        else json.loads(getattr(plain, name).model_dump_json()) | section
        for name, section in STATES[state].items()
    }
    straight = train_run(make("straight", **sections))
    with monkeypatch.context() as patch:
        at_step(patch, 5, power_cut)
        with pytest.raises(PowerCut):
            train_run(make("died", **sections))
    assert_same_result(train_run(make("died", **sections)), straight)
    if "reference" in sections:
        rows = metrics_of(straight)[1:]
        # 10 prompts, 2 per step: an epoch has 5 steps
        due = [5] if "epoch" in state else [2, 4, 6]
        assert [row["step"] for row in rows if row["reference/moved"]] == due
